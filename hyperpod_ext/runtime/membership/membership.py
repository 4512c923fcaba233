"""Who is in the job, in which generation, and what happens next. Pure: messages in, commands out.

    forming ──all joined──▶ restoring ──all restored──▶ running ──all done──▶ ended
       ▲                        │ a source failed: next best      │
       └──────── fault: the generation rises, everybody leaves ◀──┘

Every message carries the generation its sender believes in; older ones are ignored. A lost node's ranks go to a spare,
or wait for a node to come; how far up a fault is taken is in `ladder.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from hyperpod_ext.runtime.membership.actions import (
    Abort,
    AskDurable,
    AskStop,
    AwaitNode,
    Begin,
    Cancel,
    Command,
    Dismiss,
    Fail,
    Fault,
    Finish,
    Go,
    GoOn,
    Log,
    Phase,
    Prepare,
    Replace,
    Restore,
    Retire,
    Rung,
    StopAt,
    TakeOver,
    Unprepare,
    WantNodes,
)
from hyperpod_ext.runtime.membership.escalation import Budgets, give_up, no_node, rung_of
from hyperpod_ext.runtime.membership.restoring import Restoring
from hyperpod_ext.runtime.snapshot.select import Offer

__all__ = [
    "Abort",
    "AskDurable",
    "AskStop",
    "AwaitNode",
    "Begin",
    "Budgets",
    "Cancel",
    "Command",
    "Dismiss",
    "Fail",
    "Fault",
    "Finish",
    "Go",
    "GoOn",
    "Log",
    "Membership",
    "Phase",
    "Prepare",
    "Replace",
    "Restore",
    "Retire",
    "Rung",
    "StopAt",
    "TakeOver",
    "Unprepare",
    "WantNodes",
]


@dataclass(slots=True)
class Membership(Restoring):
    """State machine of one job's membership."""

    faults: list[Fault] = field(default_factory=list)
    done: dict[int, str] = field(default_factory=dict)
    """Ranks that finished, with the digest of their final state."""
    budgets: Budgets | None = None
    """What each rung of the ladder may take, where it is not the usual."""
    spares: set[int] = field(default_factory=set)
    """Healthy nodes without a rank."""
    vacant: set[int] = field(default_factory=set)
    """Ranks that wait for a node to come."""
    losses: dict[int, int] = field(default_factory=dict)
    """How often each node was lost, or given up."""
    spares_used: int = 0

    def __post_init__(self) -> None:
        self.nodes = dict(self.nodes)
        self.budgets = self.budgets or Budgets(self.max_restarts)

    def join(self, rank: int, live: Offer | None, held: list[Offer]) -> list[Command]:
        """`rank` waits for a generation; `held` is what its node's memory server has."""
        if self.phase is not Phase.FORMING:
            return []
        self.joined[rank] = live
        self._held[self.nodes[rank]] = held
        return self._begin() if self._everybody else []

    def missing(self) -> list[int]:
        """Ranks with a node that the forming generation waits for."""
        forming = self.phase is Phase.FORMING
        return sorted(self.nodes.keys() - self.joined.keys() - self.vacant) if forming else []

    def step_committed(self, step: int) -> None:
        self.committed = max(self.committed, step)

    def fault(self, fault: Fault, generation: int) -> list[Command]:
        """A process died, or a rank's training function raised, in `generation`."""
        left_already = generation < self.generation
        if self.phase is Phase.ENDED or (left_already and not fault.died):
            return []  # what a rank met on its way out of an older generation is no news
        met = self._meet(replace(fault, node=self.nodes[fault.rank]))
        if isinstance(met, Fail):
            return [self._end(met)]
        commands: list[Command] = []
        if not left_already and self.phase is not Phase.FORMING:
            commands.append(self._leave(fault))
        # else nobody trains, so there is nothing to abort: the others go on waiting for this rank
        self.joined.pop(fault.rank, None)
        if met is Rung.NODE:
            node = self.nodes[fault.rank]
            self._retiring.add(node)
            return [*commands, Retire(node), *self._move(node)]
        return [*commands, Replace(fault.rank)] if met is Rung.PROCESS else commands

    def _meet(self, fault: Fault) -> Rung | Fail:
        """Write the fault down; how far up it is taken, or why the job ends with it."""
        assert self.budgets is not None
        failure, rung = give_up(fault, self.faults, self.budgets), rung_of(fault, self.faults, self.budgets)
        if rung is Rung.NODE and not fault.whole_node and not self.spares:
            rung = Rung.PROCESS  # a node that fails often is better than none
        self.faults.append(replace(fault, rung=rung))
        return failure or rung

    def _leave(self, fault: Fault) -> Abort:
        self.generation += 1
        self.phase, self.joined, self.restored, self.done = Phase.FORMING, {}, set(), {}
        self._held, self._refused, self._stored, self._last_try = {}, set(), None, ""
        self._problems, self._unreachable, self._asked_besides = (), (), frozenset()
        return Abort(self.generation, fault)

    # --- nodes come and go ----------------------------------------------------------------------

    def node_came(self, node: int) -> list[Command]:
        """A node is there that has no rank: it takes those that have none, or waits as a spare."""
        self.spares.add(node)
        if not self.vacant or self.phase is Phase.ENDED:
            return []
        waiting = {self.nodes[rank] for rank in self.vacant}
        # its own first: were it given another's and lost again, the next node would be given both as one's
        return self._give(node if node in waiting else min(waiting))

    def is_shut_out(self, node: int) -> bool:
        """Whether a node has been lost so often that it is not taken again."""
        assert self.budgets is not None
        return self.losses.get(node, 0) >= self.budgets.quarantine_after

    def spares_left(self, spares: int) -> bool:
        """Whether a spare is there, or still to come, of those that the job began with."""
        return bool(self.spares) or spares > self.spares_used

    def node_lost(self, node: int, cause: str) -> list[Command]:
        """All processes of `node` are gone, or nobody can tell any more what they do."""
        self.spares.discard(node)
        self._retiring.discard(node)
        self._held.pop(node, None)
        ranks = self._ranks_on(node)
        if self.phase is Phase.ENDED:
            return []
        if not ranks:
            return self._begin() if self._everybody else []
        fault = Fault(ranks[0], cause, self.committed + 1, died=True, node=node, whole_node=True)
        met = self._meet(fault)
        if isinstance(met, Fail):
            return [self._end(met)]
        left = [] if self.phase is Phase.FORMING else [self._leave(fault)]
        return [*left, *self._move(node)]

    def retired(self, node: int, held: list[Offer]) -> list[Command]:
        """A node that was given up has ended its workers; its memory still serves what it holds."""
        if node not in self._retiring:
            return []
        self._retiring.discard(node)
        self._held[node] = held
        return self._begin() if self._everybody else []

    def no_node_came(self, node: int, waited_s: float) -> list[Command]:
        """The time is over in which another node could have taken the place of `node`."""
        if self.phase is Phase.ENDED or not any(self.nodes[rank] == node for rank in self.vacant):
            return []
        fault = next(fault for fault in reversed(self.faults) if fault.whole_node and fault.node == node)
        earlier = self.faults[: self.faults.index(fault)]
        return [self._end(no_node(fault, earlier, waited_s, self.spares_used))]

    def _ranks_on(self, node: int) -> list[int]:
        return sorted(rank for rank, its in self.nodes.items() if its == node and rank not in self.vacant)

    def _move(self, node: int) -> list[Command]:
        """All ranks of `node` to a spare, or to whoever comes."""
        self.losses[node] = self.losses.get(node, 0) + 1
        for rank in self._ranks_on(node):
            self.vacant.add(rank)
            self.joined.pop(rank, None)
        return self._give(node) if self.spares else [AwaitNode(node)]

    def _give(self, lost: int) -> list[Command]:
        """The ranks that `lost` had, to the first spare."""
        spare = min(self.spares)
        ranks = tuple(sorted(rank for rank in self.vacant if self.nodes[rank] == lost))
        self.spares.discard(spare)
        self.spares_used += 1
        self.vacant -= set(ranks)
        self.nodes = {**self.nodes, **dict.fromkeys(ranks, spare)}
        return [TakeOver(spare, ranks), *(Replace(rank) for rank in ranks)]

    # --- what another coordinator needs to go on ------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """What must not be lost with the coordinator."""
        return {
            "nodes": {str(rank): node for rank, node in self.nodes.items()},
            "generation": self.generation,
            "ended": self.phase is Phase.ENDED,
            "committed": self.committed,
            "began": {str(generation): step for generation, step in self.began.items()},
            "faults": [asdict(fault) | {"rung": fault.rung and fault.rung.value} for fault in self.faults],
            "spares": sorted(self.spares),
            "spares_used": self.spares_used,
            "vacant": sorted(self.vacant),
            "losses": {str(node): count for node, count in self.losses.items()},
        }

    @classmethod
    def revived(
        cls, data: Mapping[str, Any], budgets: Budgets, *, durable: bool, generation: int, committed: int
    ) -> tuple[Self, list[Command]]:
        """The membership under a new coordinator, and what everybody is told first.

        Args:
            data: newest state that any member had been told of.
            generation, committed: the newest that any member has heard of.
        """
        faults = [Fault(**(fault | {"rung": Rung(fault["rung"])})) for fault in data["faults"]]
        membership = cls(
            {int(rank): int(node) for rank, node in data["nodes"].items()},
            budgets.max_restarts,
            durable=durable,
            generation=max(generation, int(data["generation"])),
            phase=Phase.ENDED if data["ended"] else Phase.FORMING,
            faults=faults,
            committed=max(committed, int(data["committed"])),
            began={int(its): int(step) for its, step in data["began"].items()},
            budgets=budgets,
            spares=set(data["spares"]),
            vacant=set(data["vacant"]),
            losses={int(node): int(count) for node, count in data["losses"].items()},
            spares_used=int(data["spares_used"]),
        )
        if data["ended"]:
            return membership, []
        note = Fault(-1, "another node coordinates now", membership.committed + 1, died=False)
        waiting: list[Command] = [AwaitNode(node) for node in {membership.nodes[rank] for rank in membership.vacant}]
        return membership, [membership._leave(note), *waiting]

    def finished(self, rank: int, generation: int, digest: str) -> list[Command]:
        """`rank` has returned from its training function."""
        if generation != self.generation or self.phase is not Phase.RUNNING:
            return []
        self.done[rank] = digest
        if len(self.done) < len(self.nodes):
            return []
        self.phase = Phase.ENDED
        return [Finish()]
