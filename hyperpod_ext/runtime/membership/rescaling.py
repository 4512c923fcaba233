"""The worlds that a job has been in: which ranks moved when, and whose memory is still needed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from hyperpod_ext.runtime.membership.actions import Command, Dismiss, Fault, Log, Phase, Retire
from hyperpod_ext.runtime.membership.escalation import Budgets
from hyperpod_ext.runtime.membership.membership import Membership
from hyperpod_ext.runtime.membership.rank_assignment import Scale, blocks_of

_MOVES = 16
"""How many changes of numbers are remembered, for nodes that have missed some."""


@dataclass
class Worlds(Membership):
    """A membership whose ranks may get other numbers and nodes, from one generation to the next."""

    scale: Scale | None = None
    """None: the job has the nodes that it began with."""
    reserve: int = 0
    """Spares that are not taken for growth."""
    next_due: Callable[[int], int] = lambda step: step
    """The first step from one on that is saved to memory."""
    wanted: int = 0
    """Nodes with ranks that the job is on its way to."""
    desired: int = 0
    """What was asked for last; a node that comes by itself is taken up to here."""
    order: str = ""
    """Names who asked."""
    leavers: set[int] = field(default_factory=set)
    """Nodes that have asked to leave."""
    settling: set[int] = field(default_factory=set)
    """Nodes without a rank whose memory may still be needed."""
    settle_at: int = 0
    """Step after which it is not."""
    moves: dict[int, dict[int, int]] = field(default_factory=dict)
    """Generations in which ranks got other numbers, and which ones those whose processes stayed; the newest few."""
    sharded: bool = False
    """Whether each rank holds a part of the state that no other has."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.wanted = self.wanted or self.size
        self.desired = self.desired or self.size

    @property
    def size(self) -> int:
        """Nodes that have ranks."""
        return len(set(self.nodes.values()))

    @property
    def _each(self) -> int:
        return self.scale.workers_per_node if self.scale is not None else 1

    def _enter_world(
        self,
        why: Fault,
        after: Mapping[int, int],
        moved: Mapping[int, int],
        leaving: tuple[int, ...],
        said: Mapping[str, Any],
    ) -> list[Command]:
        """Leave the generation for one in which ranks are `after`; `said` goes into the log."""
        abort = self._leave(why)
        self.order = ""
        self.nodes = dict(after)
        self.moves = {**dict(sorted(self.moves.items())[-_MOVES:]), self.generation: dict(moved)}
        self.spares -= set(after.values())
        self.vacant = set()
        self._retiring |= set(leaving)
        self.settling |= set(leaving)
        self.settle_at = -1
        world = Log("world", {**said, "generation": self.generation, "world_size": len(after), "moved": _told(moved)})
        commands: list[Command] = [world, abort]
        return [*commands, *(Retire(node) for node in leaving)]

    @property
    def moved_in(self) -> int:
        """Generation in which ranks last got other numbers; 0: never."""
        return max(self.moves, default=0)

    def moved_since(self, generation: int) -> dict[int, int] | None:
        """New number of each rank of `generation` whose process stays; None: all have theirs still."""
        later = [moved for number, moved in sorted(self.moves.items()) if number > generation]
        if not later:
            return None
        together = later[0]
        for moved in later[1:]:
            together = {rank: moved[now] for rank, now in together.items() if now in moved}
        return together

    def rank_now(self, rank: int, generation: int) -> int | None:
        """Number that a rank of `generation` has now; None: it has none any more."""
        moved = self.moved_since(generation)
        return rank if moved is None else moved.get(rank)

    # --- nodes that have left ------------------------------------------------------------------

    def restore_reported(self, rank: int, generation: int, attempt: int, error: str) -> list[Command]:
        commands = super().restore_reported(rank, generation, attempt, error)
        if self.phase is not Phase.RUNNING or not commands:
            return commands
        assert self.decision is not None
        step = self.decision.step
        if self.settling and self.settle_at < 0:
            # shards that were cut anew are safe once they have been saved once; the step after that shows it
            self.settle_at = self.next_due(step + 1) + 1 if self.sharded else step
        return [*commands, *self.settle(step)]

    def settle(self, step: int, *, late: bool = False) -> list[Command]:
        """Every rank has committed `step`. `late`: or the time is over in which it should have."""
        if self.phase is not Phase.RUNNING or not self.settling or (step < self.settle_at and not late):
            return []
        done, self.settling = tuple(sorted(self.settling)), set()
        staying = {node for node in done if node not in self.leavers and self._stays(node)}
        self.spares |= staying
        gone = tuple(node for node in done if node not in staying)
        self.leavers -= set(gone)
        return [Dismiss(gone)] if gone else []

    def _stays(self, node: int) -> bool:
        """Whether a node without a rank is kept as a spare."""
        return node not in self.leavers and len(self.spares) < self.reserve

    def _without(self, node: int) -> set[int] | None:
        """Nodes of the world in which the job goes on without `node`; None: it needs another one in its place."""
        if self.scale is None or self.phase is Phase.ENDED or self.vacant or self.spares:
            return None
        blocks = blocks_of(self.nodes, self._each)
        if node not in blocks:
            return None
        rest = [its for its in blocks if its != node]
        rest.sort(key=lambda its: its in self.leavers)  # who is about to leave is left out first
        size = self.scale.most(len(rest))
        return None if size is None else set(rest[:size])

    # --- what another coordinator needs to go on ------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        return {
            **super().to_json(),
            "wanted": self.wanted,
            "desired": self.desired,
            "order": self.order,
            "leavers": sorted(self.leavers),
            "settling": sorted(self.settling),
            "moves": {str(generation): _told(moved) for generation, moved in self.moves.items()},
            "moved_in": self.moved_in,
            "sharded": self.sharded,
        }

    @classmethod
    def revived(
        cls, data: Mapping[str, Any], budgets: Budgets, *, durable: bool, generation: int, committed: int
    ) -> tuple[Self, list[Command]]:
        membership, commands = super().revived(
            data, budgets, durable=durable, generation=generation, committed=committed
        )
        membership.wanted, membership.desired = int(data["wanted"]), int(data["desired"])
        membership.order, membership.sharded = str(data["order"]), bool(data["sharded"])
        membership.leavers = set(data["leavers"])
        membership.settling = set(data["settling"]) - set(membership.nodes.values())
        membership.settle_at = -1
        membership.moves = {
            int(generation): {int(rank): int(now) for rank, now in moved.items()}
            for generation, moved in data["moves"].items()
        }
        return membership, commands


def _told(moved: Mapping[int, int]) -> dict[str, int]:
    return {str(rank): now for rank, now in moved.items()}
