"""The state machine of a job: its ranks, nodes and generation. Pure: methods take reports as arguments and return
actions, without I/O.

    forming ──all joined──▶ restoring ──all restored──▶ running ──all done──▶ ended
       ▲                        │ a source failed: next best      │
       └──────── fault: the generation rises, all ranks leave ◀───┘

Every message contains the generation of its sender. Messages from older generations are ignored. The ranks of a lost
node move to a spare node. Without a spare, an elastic job continues with fewer nodes, and a job of fixed size waits for
another node.

With `restart.policy: continue` (`continuing.py`), the remaining ranks form the next generation at once. Replacements
for lost ranks join later, as new nodes do.

The coordinator calls this state machine in `coordinator/reports.py`, and carries out the returned actions in
`coordinator/actions.py`. The simulator (`runtime/simulator`) also calls this state machine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Self

from hyperpod_ext.config.resize import has_already
from hyperpod_ext.counts import count
from hyperpod_ext.runtime.membership.actions import (
    Abort,
    Action,
    AskDurable,
    AwaitNode,
    Begin,
    Cancel,
    Decommission,
    EscalationLevel,
    Fail,
    Fault,
    Finish,
    Go,
    JobPhase,
    Log,
    Release,
    Replace,
    Restore,
    TakeOver,
)
from hyperpod_ext.runtime.membership.continuing import Continuing
from hyperpod_ext.runtime.membership.escalation import Budgets, give_up, level_of, no_node
from hyperpod_ext.runtime.membership.node_states import HAD_RANKS, WITH_RANKS, NodeState, NodeStates, Retention, Why
from hyperpod_ext.runtime.membership.rank_assignment import Scale
from hyperpod_ext.runtime.membership.renumbering import Renumbering, numbers_json
from hyperpod_ext.runtime.membership.rescaling import OPERATOR, PlannedRescale, Reassignment, Rescaling
from hyperpod_ext.runtime.membership.restoring import RestoreNegotiation
from hyperpod_ext.runtime.snapshot.select import Decision, Offer


class Membership:
    """State machine of one job's membership.

    Args:
        nodes: node of each rank.
        durable: whether the job has durable tiers (places for checkpoints that outlive the job, such as S3).
        scale: numbers of nodes with which the job may run; None if the job always needs as many nodes as `nodes` has.
        reserve: number of spare nodes that an elastic job does not use when it grows.
        states: state of each node; None if the job has only the nodes in `nodes`, and all of them are members.
        continues: whether the remaining ranks continue to train while lost ranks are replaced.
        script_saves: whether the script saves and loads its own state.
    """

    def __init__(
        self,
        nodes: Mapping[int, int],
        budgets: Budgets,
        *,
        durable: bool = False,
        scale: Scale | None = None,
        reserve: int = 0,
        states: NodeStates | None = None,
        generation: int = 1,
        phase: JobPhase = JobPhase.FORMING,
        committed: int = 0,
        began: Mapping[int, int] | None = None,
        faults: Collection[Fault] = (),
        spares_used: int = 0,
        continues: bool = False,
        script_saves: bool = False,
    ) -> None:
        self.nodes, self.budgets, self.durable = dict(nodes), budgets, durable
        self._counted: tuple[Mapping[int, int], int] = {}, 0
        self.states = states if states is not None else NodeStates(members=nodes.values())
        self.generation, self.phase = generation, phase
        self.committed = committed
        """Newest step that any rank has committed. The number is set back to the restored step if the job restores an
        earlier step."""
        self.began = dict(began or {})
        """For each generation of this run that has trained, the step from which the generation continued."""
        self.faults, self.spares_used = list(faults), spares_used
        self.broken = 0
        """Number of the newest generation that was ended by a fault; 0 if no fault has ended a generation."""
        self.done: dict[int, str] = {}
        """Digest of the final state of each rank that has finished training."""
        self.has_failed = False
        """Whether the job ended before all ranks were done. `has_failed` is not part of the job state, because a new
        coordinator decides again whether the job has failed."""
        self.sharing = ""
        """Word of sharing.py for the ranks that hold the same state, such as `same` or `alike:0,2`; empty until a rank
        has begun its training loop."""
        self.script_saves = script_saves
        self.restoring = self._negotiation()
        scale = scale or Scale((self.size,), max(1, len(self.nodes) // max(1, self.size)))
        self.rescaling = Rescaling(scale, reserve, wanted=self.size, desired=self.size)
        self.continuing = Continuing(continues)
        self.renumbering = Renumbering()
        self.retention = Retention()
        self.held: set[int] = set()
        """Nodes that have paused training. The next generation does not begin until all nodes in `held` have resumed
        training."""
        self.held_for_fault: set[int] = set()
        """Nodes whose last pause of training was because of a fault. A pause because of a fault is cancelled if the job
        continues without the missing ranks."""

    # --- properties -----------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of nodes with ranks. The number is cached until `nodes` is replaced by a new rank assignment."""
        if self._counted[0] is not self.nodes:
            self._counted = self.nodes, len(set(self.nodes.values()))
        return self._counted[1]

    @property
    def sharded(self) -> bool:
        """Whether each rank has its own shard of the state."""
        return self.sharing == "shard"

    @property
    def unassigned(self) -> set[int]:
        """Ranks without a node, because their node was lost and no replacement node has joined yet."""
        gone = {node for node in set(self.nodes.values()) if self.states[node] not in WITH_RANKS}
        return {rank for rank, node in self.nodes.items() if node in gone} if gone else set()

    @property
    def full_size(self) -> int:
        """Number of ranks of the job when no rank is missing."""
        return self.continuing.size(self.nodes, self.rescaling.each)

    @property
    def decision(self) -> Decision | None:
        """Which step this generation restores, and from which sources; None before the decision is made."""
        return self.restoring.decision

    @property
    def attempt(self) -> int:
        """Number of restore decisions in this generation so far."""
        return self.restoring.attempt

    def missing(self) -> list[int]:
        """Return the ranks that have a node, but have not joined the forming generation yet."""
        forming = self.phase is JobPhase.FORMING
        return sorted(self.nodes.keys() - self.restoring.joined.keys() - self.unassigned) if forming else []

    def ranks_on(self, node: int) -> list[int]:
        """Return the ranks that run on `node`, in ascending order."""
        has_ranks = self.states[node] in WITH_RANKS
        return sorted(rank for rank, other in self.nodes.items() if other == node) if has_ranks else []

    def is_shut_out(self, node: int) -> bool:
        """Return whether a node was lost so often that it may not join again."""
        return self.states.losses.get(node, 0) >= self.budgets.quarantine_after

    def spares_left(self, spares: int) -> bool:
        """Return whether the job has an unused spare node. `spares`: number of spare nodes in the spec, including nodes
        that have not joined yet."""
        return bool(self.states.those(NodeState.SPARE, NodeState.JOINING)) or spares > self.spares_used

    # --- ranks join and restore -----------------------------------------------------------------

    def join(self, rank: int, live: Offer | None, held: Collection[Offer]) -> list[Action]:
        """Record that `rank` joins the forming generation.

        Args:
            live: description of the state in the rank's process; None if the process has no complete state.
            held: descriptions of the snapshots in the memory server of the rank's node.
        """
        if self.phase is not JobPhase.FORMING:
            return []
        self.restoring.join(rank, live)
        self.restoring.hold(self.nodes[rank], held)
        return self._begin_if_complete()

    def _begin_if_complete(self) -> list[Action]:
        """Begin the generation if all ranks have joined, no node has paused training, and all decommissioned nodes have
        reported their snapshots."""
        complete = self.phase is JobPhase.FORMING and len(self.restoring.joined) == len(self.nodes)
        return self._decide() if complete and not (self.held or self.states.those(NodeState.DECOMMISSIONED)) else []

    def _decide(self) -> list[Action]:
        """Decide which step to restore. If the durable tiers may have a newer step, first request their list of
        checkpoints."""
        if self.phase is JobPhase.FORMING:
            self.generation = max(self.generation, self.restoring.newest_generation + 1)
        decided = self.restoring.decide(self.nodes, self.began, self.committed)
        if isinstance(decided, AskDurable):
            return [decided]
        if isinstance(decided, Fail):
            return [self._end(decided)]
        logged: list[Action] = []
        if (short := self.restoring.short_parity(self.began)) is not None:
            step, ranks = short
            logged.append(Log("parity_short", {"step": step, "ranks": list(ranks), "restored_step": decided.step}))
        if self.phase is JobPhase.RESTORING:
            return [*logged, Restore(self.attempt, decided)]
        self.phase = JobPhase.RESTORING
        return [*logged, Begin(self.generation, decided)]

    def durable_answered(
        self, stored: list[Offer], generation: int, problems: tuple[str, ...], unreachable: tuple[str, ...] = ()
    ) -> list[Action]:
        """Continue the restore decision with the list of checkpoints in the durable tiers.

        Args:
            stored: checkpoints that were found in the durable tiers.
            generation: newest generation that is recorded in the durable tiers.
            problems: one sentence for each file or tier that could not be read.
            unreachable: one sentence for each tier that could not be listed, and so may hold more checkpoints.
        """
        if not self.began:
            # the first generation must have a higher number than all generations of earlier runs
            self.generation = max(self.generation, generation + 1)
        self.restoring.durable_answered(stored, problems, unreachable)
        if self.phase is JobPhase.RESTORING and self.restoring.is_asking:
            return self._decide()
        return self._begin_if_complete()

    def restore_reported(self, rank: int, generation: int, attempt: int, error: str) -> list[Action]:
        """Handle a rank's report on its restore. `error`: why the restore failed; empty if the rank has restored and
        verified its state."""
        if generation != self.generation or attempt != self.attempt or self.phase is not JobPhase.RESTORING:
            return []
        if not error:
            return self._go() if self.restoring.all_restored(rank) else []
        asking = self.restoring.is_asking
        self.restoring.refuse({rank: error}, self.nodes)
        return [] if asking else self._decide()

    def _go(self) -> list[Action]:
        assert self.decision is not None
        step, self.phase = self.decision.step, JobPhase.RUNNING
        # record `step` only after a successful restore, because a failed restore rolls back no steps
        self.began[self.generation] = step
        self.committed = step  # steps of earlier generations after `step` are rolled back
        self.retention.went_on(step, self.sharing)
        unneeded = [Release(())] if self.continuing.enabled and self.renumbering.newest == self.generation else []
        return [Go(step), *unneeded, *self.release_retained(step), *self.reconcile()]

    def step_committed(self, step: int) -> None:
        """Record that a rank has committed `step`."""
        self.committed = max(self.committed, step)

    def finished(self, rank: int, generation: int, digest: str) -> list[Action]:
        """Record that `rank` has returned from its training function. Returns `Finish` once all ranks have returned."""
        if generation != self.generation or self.phase is not JobPhase.RUNNING:
            return []
        self.done[rank] = digest
        if len(self.done) < len(self.nodes):
            return []
        self.phase = JobPhase.ENDED
        return [Finish()]

    # --- faults ---------------------------------------------------------------------------------

    def fault(self, fault: Fault, generation: int) -> list[Action]:
        """Handle a fault of a rank in `generation`: the rank's process died, or its training function raised."""
        left_already = generation < self.generation
        if self.phase is JobPhase.ENDED or (left_already and not fault.died):
            return []  # an error while a rank leaves an older generation is not a new fault
        actions, node = self.rescaling.drop(self.states), self.nodes[fault.rank]
        met = self._escalate(replace(fault, node=node, late=fault.late or generation <= self.broken))
        if isinstance(met, Fail):
            return [*actions, self._end(met)]
        lost = self.ranks_on(node) if met is EscalationLevel.NODE else [fault.rank]
        if met is not EscalationLevel.IN_PROCESS and fault.died and self._can_do_without(lost):
            return [*actions, *self._do_without(lost, node if met is EscalationLevel.NODE else None, Why.FAILED)]
        if not left_already and self.phase is not JobPhase.FORMING:
            actions.append(self._leave(fault.rank))
        # no abort is needed while the next generation is forming, because no rank trains
        self.restoring.forget_ranks([fault.rank])
        if met is EscalationLevel.NODE:
            ranks = self.ranks_on(node)
            self.states.set_state(node, NodeState.DECOMMISSIONED, self.states.why(node) or Why.FAILED)
            self.retention.begin()
            return [*actions, Decommission(node), *self._move(node, ranks)]
        return [*actions, Replace(fault.rank)] if met is EscalationLevel.PROCESS else actions

    def _escalate(self, fault: Fault) -> EscalationLevel | Fail:
        """Record a fault. Returns the escalation level at which to handle the fault, or a `Fail` action if the fault
        ends the job."""
        failure, level = give_up(fault, self.faults, self.budgets), level_of(fault, self.faults, self.budgets)
        if level is EscalationLevel.NODE and not fault.node_lost and not self.states.spares:
            level = EscalationLevel.PROCESS  # keep an unreliable node if no spare can replace it
        self.faults.append(replace(fault, level=level))
        return failure or level

    def meet_again(self, node: int, generation: int) -> list[Action]:
        """Handle the return of a node that had lost its connection to the coordinator in `generation`.

        Because messages in both directions may have been lost, all ranks leave for a new generation, and the
        preparation of a rank assignment starts again. If the next generation is already forming, no other generation is
        needed: the node receives the abort now, and its ranks join.
        """
        if self.phase is JobPhase.ENDED:
            return []
        dropped, has_ranks = self.rescaling.drop(self.states), bool(self.ranks_on(node))
        joins = self.phase is JobPhase.FORMING and generation < self.generation
        return [*dropped, self._leave()] if dropped or (has_ranks and not joins) else []

    def _leave(self, rank: int = -1) -> Abort:
        """End the current generation for all ranks. `rank`: rank whose fault ends the generation; -1 if there is no
        fault."""
        self.broken = self.generation if rank >= 0 else self.broken
        self.generation += 1
        self.phase, self.done, self.restoring = JobPhase.FORMING, {}, self._negotiation()
        return Abort(self.generation, rank)

    def _negotiation(self) -> RestoreNegotiation:
        return RestoreNegotiation(self.durable, script_saves=self.script_saves)

    def _end(self, failure: Fail) -> Fail:
        self.phase, self.has_failed = JobPhase.ENDED, True
        return failure

    # --- nodes come and go ----------------------------------------------------------------------

    def begin_with_spares(self, nodes: Collection[int]) -> None:
        """Record the spare nodes that are connected when the job begins."""
        for node in nodes:
            self.states.set_state(node, NodeState.SPARE)

    def node_came(self, node: int, at: float = 0.0) -> list[Action]:
        """Add a node that joins the job. The node gets the ranks of a lost node, or becomes a spare."""
        gone = self.states[node] in (NodeState.ABSENT, NodeState.RELEASED)
        lost = [] if gone else self.node_lost(node, "its agent was restarted", at)
        if self.phase is JobPhase.ENDED:
            return lost
        waiting = {self.nodes[rank] for rank in self.unassigned}
        self.states.set_state(node, NodeState.SPARE)
        if waiting:
            # a returning node gets its own former ranks: with another lost node's ranks, a second loss of the node
            # would mix up the ranks of two lost nodes
            return [*lost, *self._give(node if node in waiting else min(waiting))]
        return [*lost, *self._grow()]

    def _grow(self) -> list[Action]:
        """Use a new spare to add ranks, if more nodes were ordered than the job has."""
        rescaling = self.rescaling
        self.continuing.gave_up = False
        if rescaling.change is not None:
            return []
        if self.size < rescaling.desired and rescaling.wanted == self.size:
            size = rescaling.scale.most(min(rescaling.desired, self.size + rescaling.free(self.states)))
            rescaling.wanted = max(self.size, size or 0)
        return self.reconcile()

    def node_lost(self, node: int, cause: str, at: float = 0.0) -> list[Action]:
        """Handle the loss of `node`, whose processes have ended or cannot be reached. `at`: Unix time at which the loss
        was detected."""
        ranks, others_wait, was_held = self.ranks_on(node), bool(self.unassigned), bool(self.held)
        self.held.discard(node)
        was = self.states.lose(node)
        self.restoring.forget_node(node)
        if self.phase is JobPhase.ENDED:
            return []
        if was is NodeState.JOINING or (not ranks and self.rescaling.prepares_on(node)):
            return self._joining_lost(f"node {node} was lost while it joined: {cause}")
        if not ranks:
            return self._begin_if_complete() or (self._refill_now() if self.continuing.is_short else [])
        if was_held and not others_wait and (rest := self.rescaling.staying_without(node, self.nodes, self.states)):
            return self._shrink(rest)  # training is paused, so losing the node is not a fault
        actions = self.rescaling.drop(self.states)
        met = self._escalate(self._loss(node, ranks[0], cause, at))
        if isinstance(met, Fail):
            return [*actions, self._end(met)]
        if not others_wait and self._can_do_without(ranks):
            self.states.count_loss(node)
            return [*actions, *self._do_without(ranks)]
        staying = None if others_wait else self.rescaling.staying_without(node, self.nodes, self.states)
        if staying is not None:
            return [*actions, *self._continue_on(staying, node)]
        if self.phase is not JobPhase.FORMING:
            actions.append(self._leave(ranks[0]))
        return [*actions, *self._move(node, ranks)]

    def _loss(self, node: int, rank: int, cause: str, at: float) -> Fault:
        return Fault(rank, cause, self.committed + 1, died=True, kind="lost", node=node, node_lost=True, at=at)

    def ends_with_loss(self, node: int, at: float = 0.0) -> bool:
        """Return whether the loss of `node` would end the job."""
        if self.phase is JobPhase.ENDED or self.held or not (ranks := self.ranks_on(node)):
            return False
        return give_up(self._loss(node, ranks[0], "", at), self.faults, self.budgets) is not None

    def decommissioned(self, node: int, held: list[Offer]) -> list[Action]:
        """Record that a decommissioned node has ended its workers. `held`: snapshots in the node's memory, which other
        nodes can still read."""
        if self.states[node] is not NodeState.DECOMMISSIONED:
            return []
        self.states.set_state(node, NodeState.RETAINED)
        self.restoring.hold(node, held)
        return self._begin_if_complete()

    def no_node_came(self, node: int, waited_s: float) -> list[Action]:
        """End the job, unless another node has taken over the ranks of the lost node `node` within `waited_s`
        seconds."""
        if self.phase is JobPhase.ENDED or not any(self.nodes[rank] == node for rank in self.unassigned):
            return []
        fault = next(fault for fault in reversed(self.faults) if fault.node_lost and fault.node == node)
        earlier = self.faults[: self.faults.index(fault)]
        return [self._end(no_node(fault, earlier, waited_s, self.spares_used))]

    # --- training without missing ranks -----------------------------------------------------------

    def _can_do_without(self, lost: Collection[int]) -> bool:
        """Return whether the remaining ranks can continue without the ranks in `lost`. A job can continue without ranks
        only if it has trained before and every rank has the full state."""
        able = self.continuing.can_do_without(self.nodes, lost)
        held = self.held - self.held_for_fault
        return able and bool(self.began) and not (self.sharded or held or self.unassigned - set(lost))

    def _do_without(self, lost: Collection[int], node: int | None = None, why: Why | None = None) -> list[Action]:
        """Continue without the ranks in `lost`. `node`: node of the lost ranks if the node must be decommissioned,
        otherwise None. `why`: reason for decommissioning `node`."""
        rank = min(lost)
        self.held.clear()  # end all pauses: nodes requested them because of this fault, before this fault was detected
        left = self.continuing.lose(self.nodes, lost, self.rescaling.each)
        self.rescaling.reset_tries()
        actions = self._reassign(Reassignment(left.after, left.moved, (), 1.0), "continued", rank)
        if node is None:
            return actions
        if why is Why.FAILED:
            self.states.count_loss(node)
        self.states.set_state(node, NodeState.DECOMMISSIONED, why)
        return [*actions, Decommission(node)]

    def _refill_now(self) -> list[Action]:
        """Prepare new processes for the missing ranks for which nodes are available."""
        if self.phase is not JobPhase.RUNNING or self.unassigned or self.rescaling.change is not None:
            return []
        refill = self.continuing.refill(self.nodes, self.states, self.rescaling.each)
        return self.rescaling.prepare(refill, self.nodes, self.states, self.committed) if refill is not None else []

    def _give_up_refill(self, why: str) -> Log:
        """Start no replacements for missing ranks until the next fault or until a new node joins."""
        self.continuing.gave_up = True
        return Log("rejoin_given_up", {"missing": self.full_size - len(self.nodes), "why": why})

    def _move(self, node: int, ranks: Collection[int]) -> list[Action]:
        """Move `ranks`, all ranks of `node`, to a spare node. If there is no spare, wait until another node joins."""
        self.states.count_loss(node)
        self.restoring.forget_ranks(ranks)
        return self._give(node) if self.states.spares else [AwaitNode(node)]

    def _give(self, lost: int) -> list[Action]:
        """Assign the ranks of lost node `lost` to the spare with the lowest node number."""
        spare = min(self.states.spares)
        ranks = tuple(sorted(rank for rank in self.unassigned if self.nodes[rank] == lost))
        self.states.set_state(spare, NodeState.MEMBER)
        self.spares_used += 1
        self.nodes = {**self.nodes, **dict.fromkeys(ranks, spare)}
        self.continuing.give(lost, spare)
        return [TakeOver(spare, ranks), *(Replace(rank) for rank in ranks)]

    def release_retained(self, step: int, *, late: bool = False) -> list[Action]:
        """Release the nodes and snapshots that the job no longer needs once every rank has committed `step`. `late`:
        whether the time limit for keeping nodes has passed, so that nodes are released in any case."""
        if self.phase is not JobPhase.RUNNING:
            return []
        unneeded, gone = self.retention.is_unneeded(step), list[int]()
        for node in sorted(self.states.going) if late or self.retention.is_over(step) else ():
            spare = self.states.why(node) is Why.RESIZED and len(self.states.spares) < self.rescaling.reserve
            self.states.set_state(node, NodeState.SPARE if spare else NodeState.RELEASED)
            gone += [] if spare else [node]
        if not (gone or unneeded):
            return []
        self.retention.moved = self.retention.moved and not unneeded
        return [Release(tuple(gone))]

    def releases_at(self, step: int) -> bool:
        """Return whether a node or snapshot can be released once every rank has committed `step`."""
        return self.retention.is_unneeded(step) or (self.retention.is_over(step) and bool(self.states.going))

    # --- training on hold -----------------------------------------------------------------------

    def hold(self, node: int, *, for_fault: bool = False) -> list[Action]:
        """Pause training, as `node` has requested. All ranks abort their current step, which does not count as a fault.

        Args:
            for_fault: whether the node requests the pause because of a fault. A job that continues without missing
                ranks ignores requests because of a fault.
        """
        if self.phase is JobPhase.ENDED or node in self.held or (for_fault and self.continuing.is_short):
            return []
        if self.states[node] in (NodeState.ABSENT, NodeState.RELEASED):
            # refuse the pause: only a message of the node could end the pause, but the coordinator ignores this node
            return []
        self.held.add(node)
        if for_fault:
            self.held_for_fault.add(node)
        else:
            self.held_for_fault.discard(node)
        dropped = self.rescaling.drop(self.states)
        return dropped if self.phase is JobPhase.FORMING else [*dropped, self._leave()]

    def resume(self, node: int, nodes: int, gone: Collection[int] = ()) -> list[Action]:
        """End the pause that `node` has requested. Training continues once no node has paused training.

        Args:
            nodes: number of nodes with which an elastic job must run from now on.
            gone: nodes that will leave the job, and are removed once no other node has paused training. If `gone` is
                empty, the nodes with number `nodes` or higher will leave.
        """
        if self.phase is JobPhase.ENDED or node not in self.held:
            return []
        self.held.discard(node)
        rescaling, actions = self.rescaling, list[Action]()
        if nodes != rescaling.wanted:
            fields = {"order": OPERATOR, "nodes": nodes}
            if why := rescaling.refusal(nodes):
                actions.append(Log("resize_refused", {**fields, "why": why}))
            else:
                actions += rescaling.want(nodes, OPERATOR, self.states)
                actions.append(Log("resize_asked", {**fields, "of": self.size}))
        fewer = rescaling.wanted == nodes < self.size
        leaving = {each for each in self.held if (each in gone if gone else each >= nodes)} if fewer else set()
        if leaving and leaving == self.held:
            self.held.clear()
            if staying := set(self.nodes.values()) - leaving:
                actions += self._shrink(staying)
        return [*actions, *self._begin_if_complete()]

    def _shrink(self, staying: Collection[int]) -> list[Action]:
        """Continue only on the nodes in `staying`. Called only while training is paused."""
        self.rescaling.wanted = len(staying)
        to = Reassignment.of(self.nodes, staying, self.rescaling.each, sharded=self.sharded)
        return self._reassign(to, "order" if self.rescaling.order else "leave")

    # --- orders to resize and to move -----------------------------------------------------------

    def resize(self, nodes: int, order: str) -> list[Action]:
        """Handle a user's order to run the job on `nodes` nodes. `order`: name of the order."""
        rescaling = self.rescaling
        why = rescaling.refusal(nodes)
        if not why and self.phase is JobPhase.ENDED:
            why = "the job is over"
        if not why and nodes == self.size == rescaling.wanted and rescaling.change is None:
            why = has_already(nodes)
        if why:
            return [Log("resize_refused", {"order": order, "nodes": nodes, "why": why})]
        dropped = [*rescaling.drop(self.states), *rescaling.want(nodes, order, self.states)]
        return [*dropped, Log("resize_asked", {"order": order, "nodes": nodes, "of": self.size}), *self.reconcile()]

    def move(self, node: int, order: str) -> list[Action]:
        """Handle a user's order to move the ranks of `node` to a spare. `order`: name of the order."""
        over, size = self.phase is JobPhase.ENDED, self.size
        short = "ranks are missing after a fault; order the move again later" if self.continuing.is_short else ""
        if why := "the job is over" if over else short or self.rescaling.why_no_move(node, size, self.states):
            return [Log("resize_refused", {"order": order, "nodes": size, "why": why})]
        self.rescaling.move(node, order, self.states)
        return [Log("resize_asked", {"order": order, "nodes": size, "of": size, "moving": node}), *self.reconcile()]

    def leave(self, node: int) -> list[Action]:
        """Handle the request of `node` to leave the job. The node is released as soon as the job no longer needs the
        node."""
        if self.phase is JobPhase.ENDED:
            return []
        if self.states[node] is NodeState.MEMBER or node == self.rescaling.moving:
            return self._depart(node)
        if self.states[node] in (NodeState.DEPARTING, NodeState.RELEASED):
            return []
        if self.states[node] in HAD_RANKS:
            self.states.ask_to_leave(node)  # the node is released once its snapshots are not needed
            return []
        dropped = self.rescaling.drop(self.states) if self.states[node] is NodeState.JOINING else []
        self.states.set_state(node, NodeState.RELEASED)
        following = self._without_departing() or self.reconcile()
        if node in self.held:  # the node paused training, and shuts down without ending the pause
            self.held.discard(node)
            following = following or self._begin_if_complete()
        return [*dropped, Release((node,)), *following]

    def _depart(self, node: int) -> list[Action]:
        """Prepare the departure of a node with ranks. If possible, the job continues with fewer nodes, or a spare takes
        over the node's ranks. If the job needs the node and has no spare, the node stays until another node joins."""
        if self._can_do_without(ranks := self.ranks_on(node)):
            dropped = self.rescaling.drop(self.states)
            return [*dropped, Log("node_leaves", {"node": node}), *self._do_without(ranks, node, Why.ASKED)]
        if self.states[node] is NodeState.MEMBER:
            self.states.ask_to_leave(node)
        else:
            self.rescaling.moving = None  # the node's request to leave replaces the user's order to move its ranks
        if cancelled := self._without_departing():
            return cancelled
        dropped = self.rescaling.drop(self.states)
        return [*dropped, Log("node_leaves", {"node": node}), *self.reconcile()]

    def _without_departing(self) -> list[Action]:
        """Reduce the wanted number of nodes by the number of departing nodes. Returns `Cancel` if too few nodes remain
        for the job."""
        if not self.states.those(NodeState.DEPARTING) - {self.rescaling.moving}:
            return []
        rest = len(self.states.those(NodeState.MEMBER, NodeState.SPARE, NodeState.JOINING))
        size = self.rescaling.scale.most(min(self.size, rest))
        if size is None:
            return [Cancel()]
        self.rescaling.wanted = size
        return []

    def gave_up_waiting(self) -> list[Action]:
        """Continue with the current nodes, because requested additional nodes did not join in time."""
        rescaling, size = self.rescaling, self.size
        if rescaling.change is not None or rescaling.wanted <= size:
            return []
        most = rescaling.scale.most(size + rescaling.free(self.states))
        rescaling.wanted = rescaling.desired = max(most or size, size)
        if rescaling.wanted == size:
            return [rescaling.refused("no other node joined in time, so the job keeps its number of nodes")]
        return self.reconcile()

    def reconcile(self) -> list[Action]:
        """Return the next actions to reach the wanted number of nodes, or to replace missing ranks."""
        if self.phase is not JobPhase.RUNNING or self.unassigned:
            return []
        if self.continuing.is_short:
            return self._refill_now()
        called_off = self.rescaling.call_off_move(self.states)
        nearer = self.rescaling.reconcile(self.nodes, self.states, self.committed, sharded=self.sharded)
        return [*called_off, *nearer]

    def prepared(self, rank: int) -> list[Action]:
        """Record that the new process for `rank` of the next rank assignment has finished its imports, and waits for
        this assignment."""
        return self.rescaling.prepared(rank, self.committed)

    def not_prepared(self, rank: int, cause: str) -> list[Action]:
        """Handle the failure of the new process for `rank` of the next rank assignment, which has died or did not
        start."""
        return self._joining_lost(f"rank {rank} of the next rank assignment does not start: {cause}")

    def _joining_lost(self, why: str) -> list[Action]:
        """Cancel the rank assignment that is being prepared. Prepare the assignment again, unless too many preparations
        have failed."""
        gives_up = self.rescaling.gives_up()
        dropped = self.rescaling.drop(self.states)
        if gives_up:
            if self.continuing.is_short:
                return [*dropped, self._give_up_refill(why)]
            return [*dropped, self.rescaling.stay(self.size, why, self.states)]
        return [*dropped, *(self._without_departing() or self.reconcile())]

    def stop_answered(self, rank: int, number: int, can: bool, making: int, over: bool) -> list[Action]:
        """Handle the answer of `rank` to stop request `number`. `StopAgreement.answered` documents the other
        arguments."""
        actions = self.rescaling.stop_answered(rank, number, can, making, over, self.committed)
        if actions is not None:
            return actions
        dropped, why = self.rescaling.drop(self.states), "the job is about to end"
        if self.continuing.is_short:
            return [*dropped, self._give_up_refill(why)]
        return [*dropped, self.rescaling.stay(self.size, why, self.states)]

    def stopped(self, rank: int, number: int) -> list[Action]:
        """Record that `rank` has stopped after the agreed step, and has saved the state that only this rank has."""
        change = self.rescaling.stopped(rank, number)
        return self._switch(change) if change is not None else []

    # --- a new rank assignment ------------------------------------------------------------------

    def _switch(self, change: PlannedRescale) -> list[Action]:
        """Begin the planned rank assignment, because all ranks have stopped."""
        departs = any(self.states[node] is NodeState.DEPARTING for node in change.to.left_out)
        cause = "leave" if departs else "order" if self.rescaling.order else "nodes"
        if self.rescaling.moving in change.to.left_out:
            cause = "move"
            self.spares_used += 1
        late = [Replace(rank) for rank in change.joining if rank not in change.ready]
        if change.refill is not None:
            cause = "rejoined"
            self.spares_used += len(self.states.those(NodeState.JOINING))
            self.continuing.filled(change.refill)
        return [*self._reassign(change.to, cause), *late]

    def _continue_on(self, staying: Collection[int], node: int) -> list[Action]:
        """Continue only on the nodes in `staying`, after the loss of `node`."""
        self.states.count_loss(node)
        refused: list[Action] = []
        if self.rescaling.order and self.rescaling.wanted != len(staying):
            why = f"node {node} was lost; the job continues with {count(len(staying), 'node')}"
            refused = [self.rescaling.refused(why)]
        self.rescaling.wanted = len(staying)
        self.rescaling.desired = max(self.rescaling.desired, len(staying))
        to = Reassignment.of(self.nodes, staying, self.rescaling.each, sharded=self.sharded)
        return [*refused, *self._reassign(to, "lost", self.faults[-1].rank)]

    def _reassign(self, to: Reassignment, cause: str, rank: int = -1) -> list[Action]:
        """Begin a new generation with rank assignment `to`. `rank`: rank whose fault led to the new assignment; -1
        without a fault."""
        fields = {"order": self.rescaling.order, "nodes": to.size, "of": self.size, "local_share": to.share}
        abort = self._leave(rank)
        self.rescaling.change, self.rescaling.order = None, ""
        self.nodes = dict(to.after)
        self.renumbering.add(self.generation, to.moved)
        for node in self.states.those(NodeState.JOINING):
            self.states.set_state(node, NodeState.MEMBER)
        leaving = [node for node in to.left_out if self.states[node] in WITH_RANKS]
        for node in leaving:
            self.states.set_state(node, NodeState.DECOMMISSIONED, self.states.why(node) or Why.RESIZED)
        self.rescaling.keep_moving(self.states)
        self.retention.begin(handed_on=bool(to.after.keys() - to.moved.values()))
        self.retention.moved = True
        numbers = {"generation": self.generation, "world_size": len(to.after), "moved": numbers_json(to.moved)}
        return [Log("world", {**fields, "cause": cause, **numbers}), abort, *(Decommission(node) for node in leaving)]

    # --- the job state --------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the membership as JSON, for the job state. A new coordinator passes the result to `revived`."""
        leaving = self.rescaling.change.to.left_out if self.rescaling.change is not None else ()
        return {
            "nodes": numbers_json(self.nodes),
            "generation": self.generation,
            "ended": self.phase is JobPhase.ENDED and not self.has_failed,
            "committed": self.committed,
            "began": {str(generation): step for generation, step in self.began.items()},
            "faults": [fault.to_json() for fault in self.faults],
            "spares": sorted(self.states.those(NodeState.SPARE, NodeState.JOINING)),
            "spares_used": self.spares_used,
            "unassigned": sorted(self.unassigned),
            "losses": numbers_json(self.states.losses),
            **self.rescaling.to_json(),
            "departing": sorted(self.states.asked),
            "retained": sorted(self.states.going.union(leaving)),
            "moves": self.renumbering.to_json(),
            "moved_in": self.renumbering.newest,
            "sharing": self.sharing,
            **self.continuing.to_json(self.states, self.nodes),
        }

    @classmethod
    def revived(
        cls,
        data: Mapping[str, Any],
        budgets: Budgets,
        *,
        durable: bool,
        generation: int,
        committed: int,
        scale: Scale | None = None,
        reserve: int = 0,
        continues: bool = False,
        script_saves: bool = False,
    ) -> tuple[Self, list[Action]]:
        """Create the membership from the job state, in a new coordinator. Returns the membership and the first actions
        to carry out.

        Args:
            data: result of `to_json` in the newest copy of the job state.
            generation, committed: newest generation and newest committed step in the votes for the new coordinator.
        """
        nodes = {int(rank): int(node) for rank, node in data["nodes"].items()}
        members = {node for rank, node in nodes.items() if rank not in data["unassigned"]}
        members |= set(data.get("idle", ()))
        losses = {int(node): int(count) for node, count in data["losses"].items()}
        retained = set(data["retained"]) - members
        membership = cls(
            nodes,
            budgets,
            durable=durable,
            scale=scale,
            reserve=reserve,
            states=NodeStates.known(members, data["spares"], retained, data["departing"], losses),
            generation=max(generation, int(data["generation"])),
            phase=JobPhase.ENDED if data["ended"] else JobPhase.FORMING,
            faults=[Fault.from_json(fault) for fault in data["faults"]],
            committed=max(committed, int(data["committed"])),
            began={int(number): int(step) for number, step in data["began"].items()},
            spares_used=int(data["spares_used"]),
            continues=continues,
            script_saves=script_saves,
        )
        membership.continuing.places = [int(node) for node in data.get("places", ())]
        membership.rescaling.learn(data)
        membership.renumbering = Renumbering.from_json(data["moves"])
        # snapshots under earlier rank numbers may still exist: the job state does not record whether they were released
        membership.retention.moved = bool(membership.renumbering.moves)
        membership.sharing = str(data["sharing"])
        if data["ended"]:
            return membership, []
        waiting: list[Action] = [AwaitNode(node) for node in {nodes[rank] for rank in membership.unassigned}]
        return membership, [membership._leave(), *waiting]
