"""Who is in the job, in which generation, and what happens next. Pure: messages in, actions out.

    forming ──all joined──▶ restoring ──all restored──▶ running ──all done──▶ ended
       ▲                        │ a source failed: next best      │
       └──────── fault: the generation rises, everybody leaves ◀──┘

Every message carries the generation its sender believes in; older ones are ignored. A lost node's ranks go to a spare;
where the job may have fewer nodes, it goes on without; else they wait for a node to come. The coordinator calls this
(`coordinator/reports.py`) and carries out what it returns (`coordinator/actions.py`); the simulator does, too.

Where the job continues without lost ranks (`continuing.py`), the others form the next generation at once, and the lost
ones come back as joining nodes do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Self

from hyperpod_ext.config.resize import has_already
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
        nodes: node of each rank; another one after that node was lost.
        durable: whether there are durable tiers.
        scale: numbers of nodes that the job may have; None: the one that `nodes` has.
        reserve: spares that are not taken for growth.
        states: of the nodes; None: all that have ranks are there.
        continues: whether the others go on while lost ranks are replaced.
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
    ) -> None:
        self.nodes, self.budgets, self.durable = dict(nodes), budgets, durable
        self._counted: tuple[Mapping[int, int], int] = {}, 0
        self.states = states if states is not None else NodeStates(members=nodes.values())
        self.generation, self.phase = generation, phase
        self.committed = committed
        """Newest step that some rank has reported as committed, of those that are not given up."""
        self.began = dict(began or {})
        """Step at which each generation of this run went on; those that never did are left out."""
        self.faults, self.spares_used = list(faults), spares_used
        self.broken = 0
        """The newest generation that a fault has ended."""
        self.done: dict[int, str] = {}
        """Ranks that finished, with the digest of their final state."""
        self.has_failed = False
        """Whether the job is over without all of them; another coordinator comes to that by itself, or does not."""
        self.sharing = ""
        """How the states of ranks are related, as their snapshots say; empty: no rank has begun its loop."""
        self.restoring = RestoreNegotiation(durable)
        scale = scale or Scale((self.size,), max(1, len(self.nodes) // max(1, self.size)))
        self.rescaling = Rescaling(scale, reserve, wanted=self.size, desired=self.size)
        self.continuing = Continuing(continues)
        self.renumbering = Renumbering()
        self.retention = Retention()
        self.held: set[int] = set()
        """Nodes that want no rank to train: the next generation forms, and does not begin."""

    # --- what others ask ------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Nodes that have ranks. Counted once for each rank assignment, which is never changed but replaced."""
        if self._counted[0] is not self.nodes:
            self._counted = self.nodes, len(set(self.nodes.values()))
        return self._counted[1]

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of the state that no other has."""
        return self.sharing == "shard"

    @property
    def unassigned(self) -> set[int]:
        """Ranks that wait for a node to come."""
        gone = {node for node in set(self.nodes.values()) if self.states[node] not in WITH_RANKS}
        return {rank for rank, node in self.nodes.items() if node in gone} if gone else set()

    @property
    def full_size(self) -> int:
        """Ranks that the job has when none is missing."""
        return self.continuing.size(self.nodes, self.rescaling.each)

    @property
    def decision(self) -> Decision | None:
        """What this generation restores, once that is known."""
        return self.restoring.decision

    @property
    def attempt(self) -> int:
        """How many decisions this generation has tried."""
        return self.restoring.attempt

    def missing(self) -> list[int]:
        """Ranks with a node that the forming generation waits for."""
        forming = self.phase is JobPhase.FORMING
        return sorted(self.nodes.keys() - self.restoring.joined.keys() - self.unassigned) if forming else []

    def ranks_on(self, node: int) -> list[int]:
        """Ranks that `node` has."""
        has = self.states[node] in WITH_RANKS
        return sorted(rank for rank, its in self.nodes.items() if its == node) if has else []

    def is_shut_out(self, node: int) -> bool:
        """Whether a node has been lost so often that it is not taken again."""
        return self.states.losses.get(node, 0) >= self.budgets.quarantine_after

    def spares_left(self, spares: int) -> bool:
        """Whether a spare is there, or still to come, of those that the job began with."""
        return bool(self.states.those(NodeState.SPARE, NodeState.JOINING)) or spares > self.spares_used

    # --- ranks join and restore -----------------------------------------------------------------

    def join(self, rank: int, live: Offer | None, held: Collection[Offer]) -> list[Action]:
        """`rank` waits for a generation; `held` is what its node's memory server has."""
        if self.phase is not JobPhase.FORMING:
            return []
        self.restoring.join(rank, live)
        self.restoring.hold(self.nodes[rank], held)
        return self._begin_if_complete()

    def _begin_if_complete(self) -> list[Action]:
        """Once all ranks wait for the generation, and all is known that can be restored."""
        complete = self.phase is JobPhase.FORMING and len(self.restoring.joined) == len(self.nodes)
        return self._decide() if complete and not (self.held or self.states.those(NodeState.DECOMMISSIONED)) else []

    def _decide(self) -> list[Action]:
        """Have all restore, or try the next best; ask the durable tiers first where they may have more."""
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
        """Take the checkpoints in the durable tiers, their newest generation, and the files that could not be read.

        `unreachable`: of the problems, those that do not tell whether anything is there.
        """
        if not self.began:
            self.generation = max(self.generation, generation + 1)  # writers of earlier runs are older than this one
        self.restoring.durable_answered(stored, problems, unreachable)
        if self.phase is JobPhase.RESTORING and self.restoring.is_asking:
            return self._decide()
        return self._begin_if_complete()

    def restore_reported(self, rank: int, generation: int, attempt: int, error: str) -> list[Action]:
        """`rank` has restored and verified (empty `error`), or could not."""
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
        self.began[self.generation] = step  # not before: an attempt that failed gives up no steps
        self.committed = step  # what was made after it is given up
        self.retention.went_on(step, self.sharing)
        unneeded = [Release(())] if self.continuing.enabled and self.renumbering.newest == self.generation else []
        return [Go(step), *unneeded, *self.release_retained(step), *self.reconcile()]

    def step_committed(self, step: int) -> None:
        self.committed = max(self.committed, step)

    def finished(self, rank: int, generation: int, digest: str) -> list[Action]:
        """`rank` has returned from its training function."""
        if generation != self.generation or self.phase is not JobPhase.RUNNING:
            return []
        self.done[rank] = digest
        if len(self.done) < len(self.nodes):
            return []
        self.phase = JobPhase.ENDED
        return [Finish()]

    # --- faults ---------------------------------------------------------------------------------

    def fault(self, fault: Fault, generation: int) -> list[Action]:
        """A process died, or a rank's training function raised, in `generation`."""
        left_already = generation < self.generation
        if self.phase is JobPhase.ENDED or (left_already and not fault.died):
            return []  # what a rank met on its way out of an older generation is no news
        actions, node = self.rescaling.drop(self.states), self.nodes[fault.rank]
        met = self._escalate(replace(fault, node=node, late=fault.late or generation <= self.broken))
        if isinstance(met, Fail):
            return [*actions, self._end(met)]
        lost = self.ranks_on(node) if met is EscalationLevel.NODE else [fault.rank]
        if met is not EscalationLevel.IN_PROCESS and fault.died and self._can_do_without(lost):
            return [*actions, *self._do_without(lost, node if met is EscalationLevel.NODE else None, Why.FAILED)]
        if not left_already and self.phase is not JobPhase.FORMING:
            actions.append(self._leave(fault.rank))
        # else nobody trains, so there is nothing to abort: the others go on waiting for this rank
        self.restoring.forget_ranks([fault.rank])
        if met is EscalationLevel.NODE:
            ranks = self.ranks_on(node)
            self.states.set_state(node, NodeState.DECOMMISSIONED, self.states.why(node) or Why.FAILED)
            self.retention.begin()
            return [*actions, Decommission(node), *self._move(node, ranks)]
        return [*actions, Replace(fault.rank)] if met is EscalationLevel.PROCESS else actions

    def _escalate(self, fault: Fault) -> EscalationLevel | Fail:
        """Write the fault down; what it costs, or why the job ends with it."""
        failure, level = give_up(fault, self.faults, self.budgets), level_of(fault, self.faults, self.budgets)
        if level is EscalationLevel.NODE and not fault.node_lost and not self.states.spares:
            level = EscalationLevel.PROCESS  # a node that fails often is better than none
        self.faults.append(replace(fault, level=level))
        return failure or level

    def meet_again(self, node: int, generation: int) -> list[Action]:
        """A node was cut off for a moment, in `generation`: what it said, or was told, may be lost. So all meet anew,
        and a change that is under way is begun anew. While the next one forms that it has yet to hear of, nothing is
        lost: it is told of that, and its ranks join."""
        if self.phase is JobPhase.ENDED:
            return []
        dropped, has_ranks = self.rescaling.drop(self.states), bool(self.ranks_on(node))
        joins = self.phase is JobPhase.FORMING and generation < self.generation
        return [*dropped, self._leave()] if dropped or (has_ranks and not joins) else []

    def _leave(self, rank: int = -1) -> Abort:
        """All leave the generation, for a fault of `rank` if one is named."""
        self.broken = self.generation if rank >= 0 else self.broken
        self.generation += 1
        self.phase, self.done, self.restoring = JobPhase.FORMING, {}, RestoreNegotiation(self.durable)
        return Abort(self.generation, rank)

    def _end(self, failure: Fail) -> Fail:
        self.phase, self.has_failed = JobPhase.ENDED, True
        return failure

    # --- nodes come and go ----------------------------------------------------------------------

    def begin_with_spares(self, nodes: Collection[int]) -> None:
        """The job begins, and these nodes are there without a rank."""
        for node in nodes:
            self.states.set_state(node, NodeState.SPARE)

    def node_came(self, node: int, at: float = 0.0) -> list[Action]:
        """A node is there that has no rank: it takes those that have none, or waits as a spare."""
        gone = self.states[node] in (NodeState.ABSENT, NodeState.RELEASED)
        lost = [] if gone else self.node_lost(node, "its agent has begun anew", at)
        if self.phase is JobPhase.ENDED:
            return lost
        waiting = {self.nodes[rank] for rank in self.unassigned}
        self.states.set_state(node, NodeState.SPARE)
        if waiting:
            # its own first: were it given another's and lost again, the next node would be given both as one's
            return [*lost, *self._give(node if node in waiting else min(waiting))]
        return [*lost, *self._grow()]

    def _grow(self) -> list[Action]:
        """Another spare is there: take it where more nodes were asked for."""
        rescaling = self.rescaling
        self.continuing.gave_up = False
        if rescaling.change is not None:
            return []
        if self.size < rescaling.desired and rescaling.wanted == self.size:
            size = rescaling.scale.most(min(rescaling.desired, self.size + rescaling.free(self.states)))
            rescaling.wanted = max(self.size, size or 0)
        return self.reconcile()

    def node_lost(self, node: int, cause: str, at: float = 0.0) -> list[Action]:
        """All processes of `node` are gone, or nobody can tell any more what they do. `at`: see `Fault`."""
        ranks, others_wait, was_held = self.ranks_on(node), bool(self.unassigned), bool(self.held)
        self.held.discard(node)
        was = self.states.lose(node)
        self.restoring.forget_node(node)
        if self.phase is JobPhase.ENDED:
            return []
        if was is NodeState.JOINING or (not ranks and self.rescaling.prepares_on(node)):
            return self._joining_lost(f"node {node} was lost on its way in: {cause}")
        if not ranks:
            return self._begin_if_complete() or (self._refill_now() if self.continuing.is_short else [])
        if was_held and not others_wait and (rest := self.rescaling.staying_without(node, self.nodes, self.states)):
            return self._shrink(rest)  # nobody trains, so nothing is lost but this node
        actions = self.rescaling.drop(self.states)
        met = self._escalate(self._loss(node, ranks[0], cause, at))
        if isinstance(met, Fail):
            return [*actions, self._end(met)]
        if not others_wait and self._can_do_without(ranks):
            self.states.count_loss(node)
            return [*actions, *self._do_without(ranks)]
        staying = None if others_wait else self.rescaling.staying_without(node, self.nodes, self.states)
        if staying is not None:
            return [*actions, *self._go_on_without(node, staying)]
        if self.phase is not JobPhase.FORMING:
            actions.append(self._leave(ranks[0]))
        return [*actions, *self._move(node, ranks)]

    def _loss(self, node: int, rank: int, cause: str, at: float) -> Fault:
        return Fault(rank, cause, self.committed + 1, died=True, kind="lost", node=node, node_lost=True, at=at)

    def ends_with_loss(self, node: int, at: float = 0.0) -> bool:
        """Whether the job would end if `node` were lost."""
        if self.phase is JobPhase.ENDED or self.held or not (ranks := self.ranks_on(node)):
            return False
        return give_up(self._loss(node, ranks[0], "", at), self.faults, self.budgets) is not None

    def decommissioned(self, node: int, held: list[Offer]) -> list[Action]:
        """A node whose ranks are elsewhere has ended its workers; its memory still serves what it holds."""
        if self.states[node] is not NodeState.DECOMMISSIONED:
            return []
        self.states.set_state(node, NodeState.RETAINED)
        self.restoring.hold(node, held)
        return self._begin_if_complete()

    def no_node_came(self, node: int, waited_s: float) -> list[Action]:
        """The time is over in which another node could have taken the place of `node`."""
        if self.phase is JobPhase.ENDED or not any(self.nodes[rank] == node for rank in self.unassigned):
            return []
        fault = next(fault for fault in reversed(self.faults) if fault.node_lost and fault.node == node)
        earlier = self.faults[: self.faults.index(fault)]
        return [self._end(no_node(fault, earlier, waited_s, self.spares_used))]

    # --- without ranks that are lost, for a while -------------------------------------------------

    def _can_do_without(self, lost: Collection[int]) -> bool:
        """Whether the others go on by themselves: they have trained, and each of them has all of the state."""
        able = self.continuing.can_do_without(self.nodes, lost)
        return able and bool(self.began) and not (self.sharded or self.held or self.unassigned - set(lost))

    def _do_without(self, lost: Collection[int], node: int | None = None, why: Why | None = None) -> list[Action]:
        """From here on, ranks are those that are left. `node`: that of the others, which gives them up, and why."""
        rank = min(lost)
        left = self.continuing.lose(self.nodes, lost, self.rescaling.each)
        self.rescaling.try_anew()
        actions = self._reassign(Reassignment(left.after, left.moved, (), 1.0), "continued", rank)
        if node is None:
            return actions
        if why is Why.FAILED:
            self.states.count_loss(node)
        self.states.set_state(node, NodeState.DECOMMISSIONED, why)
        return [*actions, Decommission(node)]

    def _refill_now(self) -> list[Action]:
        """Have the missing ranks come back, as far as there are nodes for them."""
        if self.phase is not JobPhase.RUNNING or self.unassigned or self.rescaling.change is not None:
            return []
        refill = self.continuing.refill(self.nodes, self.states, self.rescaling.each)
        return self.rescaling.prepare(refill, self.nodes, self.states, self.committed) if refill is not None else []

    def _go_on_short(self, why: str) -> Log:
        """The missing ranks do not come back before another fault, or another node, changes something."""
        self.continuing.gave_up = True
        return Log("rejoin_given_up", {"missing": self.full_size - len(self.nodes), "why": why})

    def _move(self, node: int, ranks: Collection[int]) -> list[Action]:
        """All ranks of `node` to a spare, or to a node that comes."""
        self.states.count_loss(node)
        self.restoring.forget_ranks(ranks)
        return self._give(node) if self.states.spares else [AwaitNode(node)]

    def _give(self, lost: int) -> list[Action]:
        """The ranks that `lost` had, to the first spare."""
        spare = min(self.states.spares)
        ranks = tuple(sorted(rank for rank in self.unassigned if self.nodes[rank] == lost))
        self.states.set_state(spare, NodeState.MEMBER)
        self.spares_used += 1
        self.nodes = {**self.nodes, **dict.fromkeys(ranks, spare)}
        self.continuing.give(lost, spare)
        return [TakeOver(spare, ranks), *(Replace(rank) for rank in ranks)]

    def release_retained(self, step: int, *, late: bool = False) -> list[Action]:
        """Every rank has committed `step`. `late`: or the time is over in which it should have."""
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
        """Whether anything is released once every rank has committed `step`."""
        return self.retention.is_unneeded(step) or (self.retention.is_over(step) and bool(self.states.going))

    # --- held from outside ----------------------------------------------------------------------

    def hold(self, node: int, *, for_fault: bool = False) -> list[Action]:
        """`node` wants no rank to train: all leave their step. That is no fault.

        Args:
            for_fault: it wants that for a fault: no more than others wait for where ranks are missing.
        """
        if self.phase is JobPhase.ENDED or node in self.held or (for_fault and self.continuing.is_short):
            return []
        if self.states[node] in (NodeState.ABSENT, NodeState.RELEASED):
            return []  # nothing that it says later would end that
        self.held.add(node)
        dropped = self.rescaling.drop(self.states)
        return dropped if self.phase is JobPhase.FORMING else [*dropped, self._leave()]

    def resume(self, node: int, nodes: int, gone: Collection[int] = ()) -> list[Action]:
        """`node` lets ranks train again; once all do, they go on. An elastic job goes on to `nodes` nodes.

        Those that are held still and are `gone` leave the job; if none is named, those that are none of the first
        `nodes`.
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
        leaving = {its for its in self.held if (its in gone if gone else its >= nodes)} if fewer else set()
        if leaving and leaving == self.held:
            self.held.clear()
            if staying := set(self.nodes.values()) - leaving:
                actions += self._shrink(staying)
        return [*actions, *self._begin_if_complete()]

    def _shrink(self, staying: Collection[int]) -> list[Action]:
        """Nobody trains: from here on, ranks are those of the nodes that stay."""
        self.rescaling.wanted = len(staying)
        to = Reassignment.of(self.nodes, staying, self.rescaling.each, sharded=self.sharded)
        return self._reassign(to, "order" if self.rescaling.order else "leave")

    # --- another number of nodes ----------------------------------------------------------------

    def resize(self, nodes: int, order: str) -> list[Action]:
        """Somebody wants the job on `nodes` nodes."""
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
        """Somebody wants the ranks of `node` on a spare."""
        over, size = self.phase is JobPhase.ENDED, self.size
        short = "ranks are missing since a fault; order it again once they are back" if self.continuing.is_short else ""
        if why := "the job is over" if over else short or self.rescaling.why_no_move(node, size, self.states):
            return [Log("resize_refused", {"order": order, "nodes": size, "why": why})]
        self.rescaling.move(node, order, self.states)
        return [Log("resize_asked", {"order": order, "nodes": size, "of": size, "moving": node}), *self.reconcile()]

    def leave(self, node: int) -> list[Action]:
        """A node has been told to end: it goes as soon as it is not needed any more."""
        if self.phase is JobPhase.ENDED:
            return []
        if self.states[node] is NodeState.MEMBER or node == self.rescaling.moving:
            return self._depart(node)
        if self.states[node] in (NodeState.DEPARTING, NodeState.RELEASED):
            return []
        if self.states[node] in HAD_RANKS:
            self.states.ask_to_leave(node)  # and is released once its memory is not needed
            return []
        dropped = self.rescaling.drop(self.states) if self.states[node] is NodeState.JOINING else []
        self.states.set_state(node, NodeState.RELEASED)
        goes_on = self._without_departing() or self.reconcile()
        if node in self.held:  # it ends before it could say that it resumes
            self.held.discard(node)
            goes_on = goes_on or self._begin_if_complete()
        return [*dropped, Release((node,)), *goes_on]

    def _depart(self, node: int) -> list[Action]:
        """A node with ranks leaves: the job goes on without, where it may have fewer nodes, or until another comes."""
        if self._can_do_without(ranks := self.ranks_on(node)):
            dropped = self.rescaling.drop(self.states)
            return [*dropped, Log("node_leaves", {"node": node}), *self._do_without(ranks, node, Why.ASKED)]
        if self.states[node] is NodeState.MEMBER:
            self.states.ask_to_leave(node)
        else:
            self.rescaling.moving = None  # it goes now, with a spare or without
        if cancelled := self._without_departing():
            return cancelled
        dropped = self.rescaling.drop(self.states)
        return [*dropped, Log("node_leaves", {"node": node}), *self.reconcile()]

    def _without_departing(self) -> list[Action]:
        """Want no more nodes than are there without those that leave; where those are too few, the job is cancelled."""
        if not self.states.those(NodeState.DEPARTING) - {self.rescaling.moving}:
            return []
        rest = len(self.states.those(NodeState.MEMBER, NodeState.SPARE, NodeState.JOINING))
        size = self.rescaling.scale.most(min(self.size, rest))
        if size is None:
            return [Cancel()]
        self.rescaling.wanted = size
        return []

    def gave_up_waiting(self) -> list[Action]:
        """The nodes that were asked for have not come in time: go on with those that are there."""
        rescaling, size = self.rescaling, self.size
        if rescaling.change is not None or rescaling.wanted <= size:
            return []
        most = rescaling.scale.most(size + rescaling.free(self.states))
        rescaling.wanted = rescaling.desired = max(most or size, size)
        if rescaling.wanted == size:
            return [rescaling.refused("no other node came in time; the job stays as it is")]
        return self.reconcile()

    def reconcile(self) -> list[Action]:
        """What brings the job nearer to the number of nodes that is wanted."""
        if self.phase is not JobPhase.RUNNING or self.unassigned:
            return []
        if self.continuing.is_short:
            return self._refill_now()
        called_off = self.rescaling.call_off_move(self.states)
        nearer = self.rescaling.reconcile(self.nodes, self.states, self.committed, sharded=self.sharded)
        return [*called_off, *nearer]

    def prepared(self, rank: int) -> list[Action]:
        """A joining worker has its imports done and waits."""
        return self.rescaling.prepared(rank, self.committed)

    def not_prepared(self, rank: int, cause: str) -> list[Action]:
        """A joining worker has died, or does not start."""
        return self._joining_lost(f"rank {rank} of the new world does not start: {cause}")

    def _joining_lost(self, why: str) -> list[Action]:
        """Try once more, but not for ever."""
        gives_up = self.rescaling.gives_up()
        dropped = self.rescaling.drop(self.states)
        if gives_up:
            if self.continuing.is_short:
                return [*dropped, self._go_on_short(why)]
            return [*dropped, self.rescaling.stay(self.size, why, self.states)]
        return [*dropped, *(self._without_departing() or self.reconcile())]

    def stop_answered(self, rank: int, number: int, can: bool, making: int, over: bool) -> list[Action]:
        """`rank`, which makes step `making`, can stop where it was asked to, or not; `over`: it makes no more steps."""
        actions = self.rescaling.stop_answered(rank, number, can, making, over, self.committed)
        if actions is not None:
            return actions
        dropped, why = self.rescaling.drop(self.states), "the job is about to end"
        if self.continuing.is_short:
            return [*dropped, self._go_on_short(why)]
        return [*dropped, self.rescaling.stay(self.size, why, self.states)]

    def stopped(self, rank: int, number: int) -> list[Action]:
        """`rank` has stopped at the step that was agreed on, and has saved what only it holds."""
        change = self.rescaling.stopped(rank, number)
        return self._switch(change) if change is not None else []

    # --- another rank assignment ----------------------------------------------------------------

    def _switch(self, change: PlannedRescale) -> list[Action]:
        """All have stopped: from here on, ranks are those of the change."""
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

    def _go_on_without(self, node: int, staying: Collection[int]) -> list[Action]:
        """`node` is lost: from here on, ranks are those of the nodes that stay."""
        self.states.count_loss(node)
        refused: list[Action] = []
        if self.rescaling.order and self.rescaling.wanted != len(staying):
            why = f"node {node} was lost; the job goes on with {len(staying)} nodes"
            refused = [self.rescaling.refused(why)]
        self.rescaling.wanted = len(staying)
        self.rescaling.desired = max(self.rescaling.desired, len(staying))
        to = Reassignment.of(self.nodes, staying, self.rescaling.each, sharded=self.sharded)
        return [*refused, *self._reassign(to, "lost", self.faults[-1].rank)]

    def _reassign(self, to: Reassignment, cause: str, rank: int = -1) -> list[Action]:
        """Leave the generation for one in which ranks are those of `to`."""
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

    # --- what another coordinator needs to go on ------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """What must not be lost with the coordinator."""
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
    ) -> tuple[Self, list[Action]]:
        """The membership under a new coordinator, and what everybody is told first.

        Args:
            data: newest state that any member had been told of.
            generation, committed: the newest that any member has heard of.
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
            began={int(its): int(step) for its, step in data["began"].items()},
            spares_used=int(data["spares_used"]),
            continues=continues,
        )
        membership.continuing.places = [int(node) for node in data.get("places", ())]
        membership.rescaling.learn(data)
        membership.renumbering = Renumbering.from_json(data["moves"])
        membership.retention.moved = bool(membership.renumbering.moves)  # whether that was released is not known
        membership.sharing = str(data["sharing"])
        if data["ended"]:
            return membership, []
        waiting: list[Action] = [AwaitNode(node) for node in {nodes[rank] for rank in membership.unassigned}]
        return membership, [membership._leave(), *waiting]
