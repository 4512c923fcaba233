"""The way from one number of nodes to another, or to other nodes, while all train. Pure: messages in, actions out.

    asked ──▶ enough nodes? ──▶ joining nodes start workers ──▶ all ranks agree on one step ──▶ all stop there
                  │ no: more are asked for                             │ one is past it: a later one
                  ▼
              goes on with those it has, once the time is over

Until all have stopped nothing is changed: whatever goes wrong, the change is dropped, ranks that have stopped go on,
and it is tried again. What follows then is the membership's (`membership.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.config.resize import has_already
from hyperpod_ext.runtime.membership.actions import (
    Action,
    AskStop,
    EndPrepared,
    Log,
    Prepare,
    Release,
    StopAt,
    WantNodes,
    WithdrawStop,
)
from hyperpod_ext.runtime.membership.continuing import Refill
from hyperpod_ext.runtime.membership.node_states import NodeState, NodeStates
from hyperpod_ext.runtime.membership.rank_assignment import (
    Scale,
    assign_ranks,
    blocks_of,
    choose_staying,
    local_share,
    moved_ranks,
    ranks_of,
)
from hyperpod_ext.runtime.membership.stop_agreement import Answer, StopAgreement

_AHEAD, _FARTHEST = 2, 4096
"""Steps that a common stop lies ahead."""
OPERATOR = "operator"
"""Name of the order to resize that comes with HyperPod's operator's command to go on."""
OVERTAKEN = "another order came"
NO_SPARE = "no spare is there to take the ranks; start the job with more `spares`"
_TRIES = 3
"""Deaths of joining workers before they are ready, after which the job stays as it is."""


@dataclass(frozen=True, slots=True)
class Reassignment:
    """Another rank assignment."""

    after: Mapping[int, int]
    """Node of each rank."""
    moved: Mapping[int, int]
    """New rank of each rank whose process stays."""
    left_out: tuple[int, ...]
    """Nodes that have no rank in it."""
    share: float
    """Of the state that ranks hold, what lies already on the node that needs it."""

    @classmethod
    def of(cls, nodes: Mapping[int, int], staying: Collection[int], each: int, *, sharded: bool) -> Reassignment:
        """From `nodes`, of each rank, to those that stay or join, each with so many workers."""
        before = blocks_of(nodes, each)
        blocks = assign_ranks(before, staying, sharded=sharded)
        after = ranks_of(blocks, each)
        left_out = tuple(node for node in before if node not in staying)
        share = round(local_share(before, blocks), 4) if sharded else 1.0
        return cls(after, moved_ranks(nodes, after, each), left_out, share)

    @property
    def size(self) -> int:
        """Nodes that have ranks."""
        return len(set(self.after.values()))


@dataclass(slots=True)
class PlannedRescale:
    """A reassignment that is under way, until all ranks have stopped."""

    to: Reassignment
    joining: dict[int, int]
    """Node of each rank whose process is new."""
    stop: StopAgreement
    ready: set[int] = field(default_factory=set)
    """Of those ranks, the ones that wait for it."""
    refill: Refill | None = None
    """Ranks that the job went on without come back by it."""


@dataclass(slots=True)
class Rescaling:
    """How many nodes are wanted, and the change that is under way to have them."""

    scale: Scale
    reserve: int = 0
    """Spares that are not taken for growth."""
    wanted: int = 0
    """Nodes with ranks that the job is on its way to."""
    desired: int = 0
    """What was asked for last; a node that comes by itself is taken up to here."""
    order: str = ""
    """Names the request."""
    moving: int | None = None
    """The node that the request wants to have no ranks any more, as a spare is there for them."""
    called_off: bool = False
    """The last order took back an order for more nodes: spares beyond the reserve leave."""
    change: PlannedRescale | None = None
    _questions: int = 0
    _tries: int = 0

    @property
    def each(self) -> int:
        """Ranks of a node."""
        return self.scale.workers_per_node

    def refusal(self, nodes: int) -> str:
        """Why the job cannot have so many nodes; empty: it can."""
        if nodes in self.scale.sizes:
            return ""
        if len(self.scale.sizes) == 1:
            return f"the job runs on exactly {self.scale.sizes[0]} nodes"
        return f"the job cannot run on {nodes} nodes; it can on {', '.join(map(str, self.scale.sizes))}"

    def want(self, nodes: int, order: str, states: NodeStates) -> list[Action]:
        """The job is to have so many nodes. Returns the refusal of what was ordered before, if it has not come true."""
        overtaken: list[Action] = [self.refused(OVERTAKEN)] if self.order else []
        self.keep_moving(states)
        self.called_off = order != OPERATOR and nodes < self.wanted  # the operator's pods are its own
        self.wanted = self.desired = nodes
        self.order, self._tries = order, 0
        return overtaken

    def stay(self, nodes: int, why: str, states: NodeStates) -> Log:
        """The job keeps the nodes that it has."""
        self.keep_moving(states)
        self.wanted = self.desired = nodes
        return self.refused(why)

    # --- the ranks of one node to a spare ---------------------------------------------------------

    def why_no_move(self, node: int, nodes: int, states: NodeStates) -> str:
        """Why no spare can have the ranks of `node` now; empty: one can. `nodes`: those that have ranks."""
        if states[node] is NodeState.DEPARTING:
            return f"node {node} is leaving already"
        if states[node] is not NodeState.MEMBER:
            return f"node {node} has no ranks that could move"
        if self.order or self.change is not None or self.wanted != nodes:
            return "it is on its way to other nodes; order it again after that"
        return "" if states.spares else NO_SPARE

    def move(self, node: int, order: str, states: NodeStates) -> None:
        """A spare is to have the ranks of `node`."""
        self.moving, self.order, self._tries = node, order, 0
        states.ask_to_leave(node)

    def keep_moving(self, states: NodeStates) -> None:
        """The node whose ranks were to move keeps those that it has."""
        if self.moving is not None and states[self.moving] is NodeState.DEPARTING:
            states.set_state(self.moving, NodeState.MEMBER)
        self.moving = None

    def call_off_move(self, states: NodeStates) -> list[Action]:
        """Answer an order to move that cannot come true any more, if there is one."""
        node, is_there = self.moving, self.moving is not None and states[self.moving] is NodeState.DEPARTING
        if node is None or self.change is not None or (is_there and states.spares):
            return []
        self.keep_moving(states)
        return [self.refused(NO_SPARE if is_there else f"a fault took the ranks of node {node} before")]

    def refused(self, why: str) -> Log:
        order, self.order = self.order, ""
        return Log("resize_refused", {"order": order, "nodes": self.wanted, "why": why})

    def free(self, states: NodeStates) -> int:
        """Spares that may be taken for growth."""
        return max(0, len(states.spares) - self.reserve)

    # --- towards the change ---------------------------------------------------------------------

    def reconcile(self, nodes: Mapping[int, int], states: NodeStates, committed: int, *, sharded: bool) -> list[Action]:
        """What brings the job nearer to the number of nodes that is wanted. `nodes`: of each rank, all there."""
        departing = states.those(NodeState.DEPARTING)
        if self.change is not None:
            return []
        if not departing and self.wanted == (size := len(set(nodes.values()))):
            return self._answer_order(size, states)
        before = blocks_of(nodes, self.each)
        able = [node for node in before if node not in departing]
        staying = choose_staying(before, able, self.wanted, sharded=sharded)
        short = self.wanted - len(staying)
        if short > (self.free(states) if len(able) == len(before) else len(states.spares)):
            return [WantNodes(self.wanted + self.reserve)]
        joining = sorted(states.spares)[: max(short, 0)]
        to = Reassignment.of(nodes, {*staying, *joining}, self.each, sharded=sharded)
        new = {rank: node for rank, node in to.after.items() if node in joining}
        self.change = PlannedRescale(to, new, StopAgreement(len(nodes), _AHEAD, _FARTHEST))
        fields = {"order": self.order, "nodes": to.size, "of": len(before), "leaving": list(to.left_out)}
        begun = Log("resize_begun", {**fields, "joining": joining})
        return [begun, *self._begin(self.change, states, committed)]

    def _answer_order(self, size: int, states: NodeStates) -> list[Action]:
        """The job has the nodes that it wants: answer a pending order, release nodes that came for an earlier one."""
        surplus = tuple(sorted(states.spares)[self.reserve :]) if self.called_off else ()
        for node in surplus:
            states.set_state(node, NodeState.RELEASED)
        actions: list[Action] = [Release(surplus)] if surplus else []
        if self.order:
            left = f"nodes left the job meanwhile; it goes on with {size}"
            actions += [
                self.refused(has_already(size) if self.desired == size else left),
                WantNodes(size + self.reserve),
            ]
        return actions

    def prepare(self, refill: Refill, nodes: Mapping[int, int], states: NodeStates, committed: int) -> list[Action]:
        """Ranks that the job goes on without come back."""
        to, stop = Reassignment(refill.after, refill.moved, (), 1.0), StopAgreement(len(nodes), _AHEAD, _FARTHEST)
        self.change = PlannedRescale(to, dict(refill.joining), stop, refill=refill)
        ranks = sorted(refill.joining)
        begun = Log("rejoin_begun", {"ranks": ranks, "nodes": [refill.joining[rank] for rank in ranks]})
        return [begun, *self._begin(self.change, states, committed)]

    def _begin(self, change: PlannedRescale, states: NodeStates, committed: int) -> list[Action]:
        """Start the workers that are new, or ask for a step to stop at where none is."""
        for node in states.spares.intersection(change.joining.values()):
            states.set_state(node, NodeState.JOINING)
        preparing = [Prepare(rank, node, len(change.to.after)) for rank, node in change.joining.items()]
        return [*preparing] or self._ask_stop(change, committed)

    def is_joining(self, rank: int, node: int) -> bool:
        """Whether a worker of `rank` on `node` is one that waits for the next rank assignment."""
        return self.change is not None and self.change.joining.get(rank) == node

    def prepares_on(self, node: int) -> bool:
        """Whether workers of `node` are started for the next rank assignment."""
        return self.change is not None and node in self.change.joining.values()

    def prepared(self, rank: int, committed: int) -> list[Action]:
        """A joining worker has its imports done and waits."""
        assert self.change is not None
        self.change.ready.add(rank)
        if self.change.stop.number or self.change.ready < self.change.joining.keys():
            return []
        return [Log("resize_prepared", {"ranks": sorted(self.change.ready)}), *self._ask_stop(self.change, committed)]

    def try_anew(self) -> None:
        """What was tried before counts no more."""
        self._tries = 0

    def gives_up(self) -> bool:
        """A joining worker or node was lost once more; whether that was once too often."""
        self._tries += 1
        return self._tries >= _TRIES

    def drop(self, states: NodeStates) -> list[Action]:
        """Forget about the change that is under way; ranks that have stopped go on."""
        if self.change is None:
            return []
        change, self.change = self.change, None
        for node in states.those(NodeState.JOINING):
            states.set_state(node, NodeState.SPARE)
        withdrawn = [WithdrawStop(change.stop.number)] if change.stop.number else []
        return [*withdrawn, *(EndPrepared(node) for node in sorted(set(change.joining.values())))]

    # --- where all stop -------------------------------------------------------------------------

    def _ask_stop(self, change: PlannedRescale, committed: int, *, later: bool = False) -> list[Action]:
        self._questions += 1
        return [AskStop(self._questions, change.stop.ask(self._questions, committed), later)]

    def stop_answered(
        self, rank: int, number: int, can: bool, making: int, over: bool, committed: int
    ) -> list[Action] | None:
        """`rank`, which makes step `making`, can stop where it was asked to, or not. None: the job is about to end."""
        if self.change is None:
            return []
        match self.change.stop.answered(rank, number, can, making, over):
            case Answer.AGREED:
                return [StopAt(number)]
            case Answer.ASK_AGAIN | Answer.ASK_LATER as answer:
                return self._ask_stop(self.change, committed, later=answer is Answer.ASK_LATER)
            case Answer.ENDING:
                return None
        return []

    def stopped(self, rank: int, number: int) -> PlannedRescale | None:
        """`rank` has stopped at the step that was agreed on. Returns the change to make, once all have."""
        change = self.change
        return change if change is not None and change.stop.stopped(rank, number) else None

    # --- without a node -------------------------------------------------------------------------

    def staying_without(self, node: int, nodes: Mapping[int, int], states: NodeStates) -> set[int] | None:
        """Nodes with which the job goes on when `node` is lost; None: it needs another one in its place."""
        size = self.scale.most(len(set(nodes.values())) - 1)
        if states.spares or size is None:
            return None
        rest = [its for its in blocks_of(nodes, self.each) if its != node]
        rest.sort(key=lambda its: states[its] is NodeState.DEPARTING)  # who is about to leave is left out first
        return set(rest[:size])

    # --- what another coordinator needs to go on --------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        wishes = {"wanted": self.wanted, "desired": self.desired, "order": self.order, "moving": self.moving}
        return wishes | {"called_off": self.called_off}

    def learn(self, data: Mapping[str, Any]) -> None:
        """Go on where another coordinator was."""
        self.wanted, self.desired, self.order = int(data["wanted"]), int(data["desired"]), str(data["order"])
        self.moving = None if data["moving"] is None else int(data["moving"])
        self.called_off = bool(data.get("called_off", False))
