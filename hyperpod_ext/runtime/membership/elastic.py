"""The membership of a job whose number of nodes may change while it runs. Pure: messages in, commands out.

    asked ──▶ enough nodes? ──▶ newcomers start ──▶ all ranks name one step ──▶ all stand there ──▶ a new generation
                  │ no: one is asked for                      │ one is past it: a later one
                  ▼
              goes on with those it has, once the time is over

Until the last arrow nothing is changed: whatever goes wrong, the change is dropped, those who stand go on, and it is
tried again. A node that is lost, where fewer may go on, is a new world at once, without the first four.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.runtime.membership.actions import (
    AskStop,
    Cancel,
    Command,
    Dismiss,
    Fail,
    Fault,
    GoOn,
    Log,
    Prepare,
    Replace,
    StopAt,
    Unprepare,
    WantNodes,
)
from hyperpod_ext.runtime.membership.membership import Phase
from hyperpod_ext.runtime.membership.rank_assignment import (
    assign_ranks,
    blocks_of,
    choose_staying,
    local_share,
    moved_ranks,
    ranks_of,
)
from hyperpod_ext.runtime.membership.rescaling import Worlds

_AHEAD, _FARTHEST = 2, 4096
"""Steps that a common stop lies ahead: twice as many each time that a rank was past it already."""
_TRIES = 3
"""Deaths of newcomers before they are ready, after which the job stays as it is."""


@dataclass(slots=True)
class Change:
    """From one world to the next, until all have stopped."""

    after: dict[int, int]
    """Node of each rank of the new world."""
    moved: dict[int, int]
    """New rank of each rank whose process stays."""
    coming: dict[int, int]
    """Node of each rank whose process is new."""
    leaving: tuple[int, ...]
    """Nodes that have no rank in the new world."""
    share: float
    ready: set[int] = field(default_factory=set)
    number: int = 0
    """Of the question where to stop; 0: not asked yet."""
    ahead: int = _AHEAD
    answers: dict[int, tuple[bool, int]] = field(default_factory=dict)
    """Of each rank: whether it can stop there, and which step it makes."""
    agreed: bool = False
    halted: set[int] = field(default_factory=set)


@dataclass
class ElasticMembership(Worlds):
    """State machine of one job's membership, where nodes come and go."""

    change: Change | None = None
    _number: int = 0
    _tries: int = 0

    # --- what is asked --------------------------------------------------------------------------

    def refusal(self, nodes: int) -> str:
        """Why the job cannot have so many nodes; empty: it can."""
        if self.scale is None:
            return "the job is not elastic: it runs on exactly the nodes that it began with"
        if nodes in self.scale.sizes:
            return ""
        return f"the job cannot run on {nodes} nodes; it can on {', '.join(map(str, self.scale.sizes))}"

    def resize(self, nodes: int, order: str) -> list[Command]:
        """Somebody wants the job on `nodes` nodes."""
        why = self.refusal(nodes)
        if not why and self.phase is Phase.ENDED:
            why = "the job is over"
        if not why and nodes == self.size == self.wanted and self.change is None:
            why = f"the job has {nodes} nodes already"
        if why:
            return [Log("resize_refused", {"order": order, "nodes": nodes, "why": why})]
        dropped = self._drop()
        self.wanted = self.desired = nodes
        self.order, self._tries = order, 0
        return [*dropped, Log("resize_asked", {"order": order, "nodes": nodes, "of": self.size}), *self.reconcile()]

    def leave(self, node: int) -> list[Command]:
        """A node has been told to end: it goes as soon as it is not needed any more."""
        if self.phase is Phase.ENDED:
            return []
        self.leavers.add(node)
        if node not in self.nodes.values():
            self.spares.discard(node)
            dropped = self._drop() if self.change is not None and node in self.change.coming.values() else []
            return [*dropped, Dismiss((node,)), *self.reconcile()]
        rest = len((set(self.nodes.values()) | self.spares) - self.leavers)
        size = self.scale.most(min(self.size, rest)) if self.scale is not None else None
        if size is None:
            return [Cancel()]
        dropped = self._drop()
        self.wanted = size
        return [*dropped, Log("node_leaves", {"node": node}), *self.reconcile()]

    def gave_up_waiting(self) -> list[Command]:
        """The nodes that were asked for have not come in time: go on with those that are there."""
        if self.change is not None or self.scale is None or self.wanted <= self.size:
            return []
        size = self.scale.most(self.size + self._free())
        self.wanted = self.size if size is None else max(size, self.size)
        self.desired = self.wanted
        if self.wanted == self.size:
            why = "no other node came in time; the job stays as it is"
            return [self._not_now(why)]
        return self.reconcile()

    def _free(self) -> int:
        return max(0, len(self.spares - self.leavers) - self.reserve)

    def _not_now(self, why: str) -> Log:
        order, self.order = self.order, ""
        return Log("resize_refused", {"order": order, "nodes": self.wanted, "why": why})

    # --- towards it -----------------------------------------------------------------------------

    def reconcile(self) -> list[Command]:
        """What brings the job nearer to the number of nodes that is wanted."""
        if self.scale is None or self.phase is not Phase.RUNNING or self.change is not None or self.vacant:
            return []
        before = blocks_of(self.nodes, self._each)
        staying = [node for node in before if node not in self.leavers]
        if self.wanted == len(before) == len(staying):
            return []
        all_stay = len(staying) == len(before)
        staying = choose_staying(before, staying, self.wanted, sharded=self.sharded)
        short = self.wanted - len(staying)
        free = sorted(self.spares - self.leavers)
        if short > (self._free() if all_stay else len(free)):
            return [WantNodes(self.wanted + self.reserve)]
        blocks = assign_ranks(before, {*staying, *free[:short]}, sharded=self.sharded)
        after = ranks_of(blocks, self._each)
        self.change = Change(
            after,
            moved_ranks(self.nodes, after, self._each),
            {rank: node for rank, node in after.items() if node not in staying},
            tuple(node for node in before if node not in staying),
            round(local_share(before, blocks), 4) if self.sharded else 1.0,
        )
        fields = {"order": self.order, "nodes": self.wanted, "of": len(before), "leaving": list(self.change.leaving)}
        begun = Log("resize_begun", {**fields, "joining": sorted(free[:short])})
        preparing = [Prepare(rank, node, len(after)) for rank, node in self.change.coming.items()]
        return [begun, *(preparing or self._ask_stop())]

    def is_coming(self, rank: int, node: int) -> bool:
        """Whether a worker of `rank` on `node` is one that waits for the next world."""
        return self.change is not None and self.change.coming.get(rank) == node

    def prepared(self, rank: int) -> list[Command]:
        """A newcomer has its imports done and waits."""
        assert self.change is not None
        self.change.ready.add(rank)
        if self.change.number or self.change.ready < self.change.coming.keys():
            return []
        return [Log("resize_prepared", {"ranks": sorted(self.change.ready)}), *self._ask_stop()]

    def not_prepared(self, rank: int, cause: str) -> list[Command]:
        """A newcomer has died, or does not start."""
        self._tries += 1
        dropped = self._drop()
        if self._tries < _TRIES:
            return [*dropped, *self.reconcile()]
        self.wanted = self.desired = self.size
        return [*dropped, self._not_now(f"rank {rank} of the new world does not start: {cause}")]

    def _ask_stop(self, *, later: bool = False) -> list[Command]:
        change = self.change
        assert change is not None
        self._number += 1
        newest = max([self.committed, *(at for _, at in change.answers.values())])
        change.number, change.answers, change.agreed = self._number, {}, False
        return [AskStop(change.number, newest + change.ahead, later)]

    def stop_answered(self, rank: int, number: int, can: bool, at: int, over: bool) -> list[Command]:
        """`rank`, which makes step `at`, can stop where it was asked to, or not; `over`: it makes no more steps."""
        change = self.change
        if change is None or number != change.number:
            return []
        if over:
            dropped = self._drop()
            self.wanted = self.desired = self.size
            return [*dropped, self._not_now("the job is about to end")]
        change.answers[rank] = can, at
        if len(change.answers) < len(self.nodes):
            return []
        if all(can for can, _ in change.answers.values()):
            change.agreed = True
            return [StopAt(number)]
        later = any(at < 0 for _, at in change.answers.values())
        change.ahead = change.ahead if later else min(2 * change.ahead, _FARTHEST)
        return self._ask_stop(later=later)

    def halted(self, rank: int, number: int) -> list[Command]:
        """`rank` stands at the step that was agreed on, and has saved what only it holds."""
        change = self.change
        if change is None or number != change.number or not change.agreed:
            return []
        change.halted.add(rank)
        return self._switch(change) if len(change.halted) == len(self.nodes) else []

    def _drop(self) -> list[Command]:
        """Forget about the change that is under way; those who stand go on."""
        if self.change is None:
            return []
        change, self.change = self.change, None
        going = [GoOn(change.number)] if change.number else []
        return [*going, *(Unprepare(node) for node in sorted(set(change.coming.values())))]

    # --- the new world --------------------------------------------------------------------------

    def _switch(self, change: Change) -> list[Command]:
        note = Fault(-1, f"the job goes on with {self.wanted} nodes", self.committed + 1, died=False)
        said = {
            "order": self.order,
            "nodes": len(set(change.after.values())),
            "of": self.size,
            "local_share": change.share,
            "cause": "leave" if set(change.leaving) & self.leavers else "order" if self.order else "nodes",
        }
        late = [Replace(rank) for rank in change.coming if rank not in change.ready]
        return [*self._enter_world(note, change.after, change.moved, change.leaving, said), *late]

    def _enter_world(
        self,
        why: Fault,
        after: Mapping[int, int],
        moved: Mapping[int, int],
        leaving: tuple[int, ...],
        said: Mapping[str, Any],
    ) -> list[Command]:
        self.change = None
        return super()._enter_world(why, after, moved, leaving, said)

    def restore_reported(self, rank: int, generation: int, attempt: int, error: str) -> list[Command]:
        commands = super().restore_reported(rank, generation, attempt, error)
        return [*commands, *self.reconcile()] if commands and self.phase is Phase.RUNNING else commands

    # --- nodes come and go ----------------------------------------------------------------------

    def node_came(self, node: int) -> list[Command]:
        commands = super().node_came(node)
        if self.scale is None or commands or self.phase is Phase.ENDED or self.change is not None:
            return commands
        if self.size < self.desired and self.wanted == self.size:
            size = self.scale.most(min(self.desired, self.size + self._free()))
            self.wanted = max(self.size, size or 0)
        return self.reconcile()

    def fault(self, fault: Fault, generation: int) -> list[Command]:
        commands = super().fault(fault, generation)
        return [*self._drop(), *commands] if commands else []

    def node_lost(self, node: int, cause: str) -> list[Command]:
        self.settling.discard(node)
        was_coming = self.change is not None and node in self.change.coming.values()
        was_one = node in self.nodes.values()
        self.leavers.discard(node)
        if was_coming and not was_one:
            self.spares.discard(node)
            self._tries += 1
            dropped = self._drop()
            if self._tries >= _TRIES:
                self.wanted = self.desired = self.size
                return [*dropped, self._not_now(f"node {node} was lost on its way in: {cause}")]
            return [*dropped, *self.reconcile()]
        smaller = self._without(node)
        if smaller is None:
            return [*self._drop(), *super().node_lost(node, cause)]
        dropped = self._drop()
        self._retiring.discard(node)
        self._held.pop(node, None)
        fault = Fault(self._ranks_on(node)[0], cause, self.committed + 1, died=True, node=node, whole_node=True)
        met = self._meet(fault)
        if isinstance(met, Fail):
            return [*dropped, self._end(met)]
        self.losses[node] = self.losses.get(node, 0) + 1
        before = blocks_of(self.nodes, self._each)
        blocks = assign_ranks(before, smaller, sharded=self.sharded)
        after = ranks_of(blocks, self._each)
        leaving = tuple(its for its in before if its not in smaller and its != node)
        as_ordered = self.wanted == len(smaller)
        if self.order and not as_ordered:
            why = f"node {node} was lost; the job goes on with {len(smaller)} nodes"
            dropped = [*dropped, self._not_now(why)]
        self.wanted = len(smaller)
        self.desired = max(self.desired, self.wanted)
        said = {
            "order": self.order,
            "nodes": len(smaller),
            "of": len(before),
            "cause": "lost",
            "local_share": round(local_share(before, blocks), 4) if self.sharded else 1.0,
        }
        moved = moved_ranks(self.nodes, after, self._each)
        return [*dropped, *self._enter_world(fault, after, moved, leaving, said)]

    # --- what another coordinator needs to go on ------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        leaving = set(self.change.leaving) if self.change is not None else set()
        return {**super().to_json(), "settling": sorted(self.settling | leaving)}
