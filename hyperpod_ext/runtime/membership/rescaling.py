"""Prepares a new rank assignment while all ranks train: for a resize, for a move of ranks to a spare, or to replace
missing ranks. Pure: methods take reports as arguments and return actions, without I/O.

    ordered ──▶ enough nodes? ──▶ joining nodes start workers ──▶ all ranks agree on one step ──▶ all stop after it
                    │ no: more are requested                             │ one is past it: a later step
                    ▼
                continues with the existing nodes, after a timeout

The current rank assignment stays in use until all ranks have stopped. If anything fails before all ranks have stopped,
the plan is cancelled, stopped ranks continue, and the preparation starts again. Once all ranks have stopped,
`membership.py` begins the new rank assignment.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.config.resize import has_already
from hyperpod_ext.counts import count
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
"""First and largest value of the number of steps between the newest committed step and the step after which all ranks
stop."""
OPERATOR = "operator"
"""Name of a resize order that came with a resume command of the HyperPod operator."""
OVERTAKEN = "another order came"
NO_SPARE = "no spare node can take over the ranks; start the job with more `spares`"
_TRIES = 3
"""Number of losses of joining workers or nodes after which a new rank assignment is given up."""


@dataclass(frozen=True, slots=True)
class Reassignment:
    """A new rank assignment, and its differences from the current assignment."""

    after: Mapping[int, int]
    """Node of each rank."""
    moved: Mapping[int, int]
    """New rank of each process that stays, by old rank."""
    left_out: tuple[int, ...]
    """Nodes that lose all their ranks."""
    share: float
    """Share (0 to 1) of the state that is already on the node that needs this state after the change."""

    @classmethod
    def of(cls, nodes: Mapping[int, int], staying: Collection[int], each: int, *, sharded: bool) -> Reassignment:
        """Compute the new rank assignment for the nodes in `staying`.

        Args:
            nodes: current node of each rank.
            staying: nodes that have ranks after the change, including nodes that join.
            each: ranks per node.
            sharded: whether each rank has its own shard of the state.
        """
        before = blocks_of(nodes, each)
        blocks = assign_ranks(before, staying, sharded=sharded)
        after = ranks_of(blocks, each)
        left_out = tuple(node for node in before if node not in staying)
        share = round(local_share(before, blocks), 4) if sharded else 1.0
        return cls(after, moved_ranks(nodes, after, each), left_out, share)

    @property
    def size(self) -> int:
        """Number of nodes that have ranks after the change."""
        return len(set(self.after.values()))


@dataclass(slots=True)
class PlannedRescale:
    """A new rank assignment in preparation, which takes effect when all ranks have stopped."""

    to: Reassignment
    joining: dict[int, int]
    """Node of the new process of each rank that gets a new process."""
    stop: StopAgreement
    ready: set[int] = field(default_factory=set)
    """Ranks in `joining` whose new processes are ready, and wait for the new assignment."""
    refill: Refill | None = None
    """The plan for replacing missing ranks; None if the new assignment replaces no missing ranks."""


@dataclass(slots=True)
class Rescaling:
    """Tracks the wanted number of nodes, the pending order, and the rank assignment in preparation."""

    scale: Scale
    reserve: int = 0
    """Number of spare nodes that the job does not use when it grows."""
    wanted: int = 0
    """Number of nodes with ranks that the job is now trying to reach."""
    desired: int = 0
    """Number of nodes in the last resize order. Nodes that join later get ranks until the job has `desired` nodes."""
    order: str = ""
    """Name of the pending order to resize or to move ranks; empty if no order is pending."""
    moving: int | None = None
    """Node whose ranks the pending order moves to a spare; None if no order to move ranks is pending."""
    called_off: bool = False
    """Whether the last order reduced the wanted number of nodes, so that spares beyond the reserve are released."""
    change: PlannedRescale | None = None
    _questions: int = 0
    """Number of the latest stop request, counted from 1; 0 before the first request."""
    _tries: int = 0
    """Number of losses of joining workers or nodes since the last order."""

    @property
    def each(self) -> int:
        """Number of ranks per node."""
        return self.scale.workers_per_node

    def refusal(self, nodes: int) -> str:
        """Return why the job cannot run on `nodes` nodes; empty if the job can."""
        if nodes in self.scale.sizes:
            return ""
        if len(self.scale.sizes) == 1:
            return f"the job runs on exactly {count(self.scale.sizes[0], 'node')}"
        return f"the job cannot run on {count(nodes, 'node')}; it can run on {', '.join(map(str, self.scale.sizes))}"

    def want(self, nodes: int, order: str, states: NodeStates) -> list[Action]:
        """Set the wanted number of nodes. Returns the refusal of an order that is still pending, or an empty list."""
        overtaken: list[Action] = [self.refused(OVERTAKEN)] if self.order else []
        self.keep_moving(states)
        # no spares are released for an order of the HyperPod operator, because the operator itself removes pods
        self.called_off = order != OPERATOR and nodes < self.wanted
        self.wanted = self.desired = nodes
        self.order, self._tries = order, 0
        return overtaken

    def stay(self, nodes: int, why: str, states: NodeStates) -> Log:
        """Keep the job on its present number of nodes, `nodes`, and refuse the pending order with reason `why`."""
        self.keep_moving(states)
        self.wanted = self.desired = nodes
        return self.refused(why)

    # --- moving the ranks of one node to a spare --------------------------------------------------

    def why_no_move(self, node: int, nodes: int, states: NodeStates) -> str:
        """Return why the ranks of `node` cannot move to a spare now; empty if the ranks can move. `nodes`: number of
        nodes with ranks."""
        if states[node] is NodeState.DEPARTING:
            return f"node {node} is leaving already"
        if states[node] is not NodeState.MEMBER:
            return f"node {node} has no ranks that could move"
        if self.order or self.change is not None or self.wanted != nodes:
            return "the job is being resized; order the move again after the resize"
        return "" if states.spares else NO_SPARE

    def move(self, node: int, order: str, states: NodeStates) -> None:
        """Accept `order`, to move the ranks of `node` to a spare, as the pending order."""
        self.moving, self.order, self._tries = node, order, 0
        states.ask_to_leave(node)

    def keep_moving(self, states: NodeStates) -> None:
        """Cancel the pending move of a node's ranks, so that the node keeps its ranks."""
        if self.moving is not None and states[self.moving] is NodeState.DEPARTING:
            states.set_state(self.moving, NodeState.MEMBER)
        self.moving = None

    def call_off_move(self, states: NodeStates) -> list[Action]:
        """Refuse the pending order to move ranks if it has become impossible."""
        node, has_ranks = self.moving, self.moving is not None and states[self.moving] is NodeState.DEPARTING
        if node is None or self.change is not None or (has_ranks and states.spares):
            return []
        self.keep_moving(states)
        return [self.refused(NO_SPARE if has_ranks else f"a fault has already moved the ranks of node {node}")]

    def refused(self, why: str) -> Log:
        """Remove the pending order, and return the log entry with which the order is refused for reason `why`."""
        order, self.order = self.order, ""
        return Log("resize_refused", {"order": order, "nodes": self.wanted, "why": why})

    def free(self, states: NodeStates) -> int:
        """Return the number of spares that may be used for growth."""
        return max(0, len(states.spares) - self.reserve)

    # --- preparing the change -----------------------------------------------------------------------

    def reconcile(self, nodes: Mapping[int, int], states: NodeStates, committed: int, *, sharded: bool) -> list[Action]:
        """Return the next actions to reach the wanted number of nodes. `nodes`: node of each rank. Called only while
        every rank has a node."""
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
        """Confirm the pending order, because the job already has the wanted number of nodes. Releases spares that
        joined for an earlier, larger order."""
        surplus = tuple(sorted(states.spares)[self.reserve :]) if self.called_off else ()
        for node in surplus:
            states.set_state(node, NodeState.RELEASED)
        actions: list[Action] = [Release(surplus)] if surplus else []
        if self.order:
            left = f"nodes left the job in the meantime; it has {size}"
            actions += [
                self.refused(has_already(size) if self.desired == size else left),
                WantNodes(size + self.reserve),
            ]
        return actions

    def prepare(self, refill: Refill, nodes: Mapping[int, int], states: NodeStates, committed: int) -> list[Action]:
        """Begin to prepare the rank assignment `refill`, in which missing ranks return."""
        to, stop = Reassignment(refill.after, refill.moved, (), 1.0), StopAgreement(len(nodes), _AHEAD, _FARTHEST)
        self.change = PlannedRescale(to, dict(refill.joining), stop, refill=refill)
        ranks = sorted(refill.joining)
        begun = Log("rejoin_begun", {"ranks": ranks, "nodes": [refill.joining[rank] for rank in ranks]})
        return [begun, *self._begin(self.change, states, committed)]

    def _begin(self, change: PlannedRescale, states: NodeStates, committed: int) -> list[Action]:
        """Start the new workers of a rank assignment in preparation. If there are no new workers, request the common
        stop of all ranks at once."""
        for node in states.spares.intersection(change.joining.values()):
            states.set_state(node, NodeState.JOINING)
        preparing = [Prepare(rank, node, len(change.to.after)) for rank, node in change.joining.items()]
        return [*preparing] or self._ask_stop(change, committed)

    def is_joining(self, rank: int, node: int) -> bool:
        """Return whether the worker of `rank` on `node` was started for the next rank assignment."""
        return self.change is not None and self.change.joining.get(rank) == node

    def prepares_on(self, node: int) -> bool:
        """Return whether `node` starts workers for the next rank assignment."""
        return self.change is not None and node in self.change.joining.values()

    def prepared(self, rank: int, committed: int) -> list[Action]:
        """Record that the new worker for `rank` is ready. Once all new workers are ready, requests the common stop of
        all ranks."""
        assert self.change is not None
        self.change.ready.add(rank)
        if self.change.stop.number or self.change.ready < self.change.joining.keys():
            return []
        return [Log("resize_prepared", {"ranks": sorted(self.change.ready)}), *self._ask_stop(self.change, committed)]

    def reset_tries(self) -> None:
        """Set the number of losses of joining workers and nodes back to 0."""
        self._tries = 0

    def gives_up(self) -> bool:
        """Count a loss of a joining worker or node. Returns whether the new rank assignment must be given up, because
        of too many losses."""
        self._tries += 1
        return self._tries >= _TRIES

    def drop(self, states: NodeStates) -> list[Action]:
        """Cancel the rank assignment in preparation. Ranks that have already stopped for this assignment continue to
        train."""
        if self.change is None:
            return []
        change, self.change = self.change, None
        for node in states.those(NodeState.JOINING):
            states.set_state(node, NodeState.SPARE)
        withdrawn = [WithdrawStop(change.stop.number)] if change.stop.number else []
        return [*withdrawn, *(EndPrepared(node) for node in sorted(set(change.joining.values())))]

    # --- the common stop ------------------------------------------------------------------------

    def _ask_stop(self, change: PlannedRescale, committed: int, *, later: bool = False) -> list[Action]:
        self._questions += 1
        return [AskStop(self._questions, change.stop.ask(self._questions, committed), later)]

    def stop_answered(
        self, rank: int, number: int, can: bool, making: int, over: bool, committed: int
    ) -> list[Action] | None:
        """Handle the answer of `rank` to stop request `number`. Returns None if a rank makes no more steps because the
        job is about to end. `StopAgreement.answered` documents the other arguments."""
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
        """Record that `rank` has stopped after the agreed step. Returns the prepared rank assignment once all ranks
        have stopped, otherwise None."""
        change = self.change
        return change if change is not None and change.stop.stopped(rank, number) else None

    # --- without a node -------------------------------------------------------------------------

    def staying_without(self, node: int, nodes: Mapping[int, int], states: NodeStates) -> set[int] | None:
        """Return the nodes on which the job can continue at once after the loss of `node`. Returns None if the job
        cannot run on fewer nodes, or if a spare can replace `node`."""
        size = self.scale.most(len(set(nodes.values())) - 1)
        if states.spares or size is None:
            return None
        rest = [other for other in blocks_of(nodes, self.each) if other != node]
        rest.sort(key=lambda other: states[other] is NodeState.DEPARTING)  # leave out departing nodes first
        return set(rest[:size])

    # --- the job state ----------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the order and the wanted numbers of nodes, for the job state."""
        wishes = {"wanted": self.wanted, "desired": self.desired, "order": self.order, "moving": self.moving}
        return wishes | {"called_off": self.called_off}

    def learn(self, data: Mapping[str, Any]) -> None:
        """Restore the order and the wanted numbers of nodes from a former coordinator's job state."""
        self.wanted, self.desired, self.order = int(data["wanted"]), int(data["desired"]), str(data["order"])
        self.moving = None if data["moving"] is None else int(data["moving"])
        self.called_off = bool(data.get("called_off", False))
