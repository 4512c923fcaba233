"""Processes reports of agents and workers: calls `Membership`, writes events, and carries out the resulting actions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Set
from dataclasses import replace

from hyperpod_ext.runtime.coordinator.actions import Actions
from hyperpod_ext.runtime.coordinator.job_context import JobContext
from hyperpod_ext.runtime.coordinator.lost_nodes import LostNodes
from hyperpod_ext.runtime.coordinator.queries import HangQuery, LivenessQuery
from hyperpod_ext.runtime.detection.hangs import Hang, Heartbeat
from hyperpod_ext.runtime.events.of_training import Step, is_sampled
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc.declared import Count, Declared, encode, read
from hyperpod_ext.runtime.ipc.gathered import HeldOffers, RankJoin, joins_of
from hyperpod_ext.runtime.membership.actions import Fail, Fault, JobPhase
from hyperpod_ext.runtime.snapshot.select import Offer

_TOGETHER_S = 1.0
"""Number of seconds for which requests to leave are collected. When a job is deleted, most of its nodes receive SIGTERM
within this time, and request to leave."""
_OF_STEPS = ("begun", "step", "script_saved", "collective_broke")
_OF_SAMPLED = frozenset({"groups_open", "aborted", "script_saved", "saves_set_aside"})
"""Events that are logged only for some sampled ranks."""
_OWN = frozenset({"type", "event", "t", "self"})
"""Names of event fields that the sender of an event must not set."""
_OF_STEP = frozenset(Step.model_fields)
"""Names of the declared fields of a `step` event, whose other fields are metrics that the script has logged."""


class _OfStep(Declared, extra="ignore"):
    """The fields that the coordinator reads from events about a training step."""

    step: Count
    began: float = 0.0
    sharing: str = ""
    cause: str = ""
    loaded: Count | None = None


class StepSampler:
    """Selects the `step` events to log: all steps of sampled ranks and, of the lowest rank that logs metrics, the steps
    with metrics."""

    def __init__(self) -> None:
        self._generation, self._lowest = -1, 0

    def takes(self, rank: int, generation: int, fields: Iterable[str]) -> bool:
        """Return whether to log a `step` event of `rank`. `fields`: names of the event's fields."""
        has_numbers = any(name not in _OF_STEP for name in fields)
        if has_numbers and (generation != self._generation or rank <= self._lowest):
            self._generation, self._lowest = generation, rank
            return True
        return is_sampled(rank)


class Reports:
    """Processes the reports of agents."""

    def __init__(self, job: JobContext, actions: Actions, lost_nodes: LostNodes) -> None:
        self._run, self._members, self._membership, self._outbox = job.run, job.members, job.membership, job.outbox
        self._ranks, self._schedule, self._formation = job.ranks, job.schedule, job.formation
        self._log, self._actions, self._end, self._lost_nodes = job.events.write, actions, actions.end, lost_nodes
        self._step_sampler = StepSampler()
        self._hangs = HangQuery()
        self._liveness: LivenessQuery | None = None
        self._loaded: tuple[int, int, int] | None = None
        """Generation, rank and step of the first checkpoint that a script with `mode: run` has loaded itself; None if
        the script has loaded no checkpoint."""
        self._leaving: set[int] = set()
        """Nodes that have requested to leave, and whose requests are still being collected."""

    def take(self, node: int, report: c.FromAgent) -> None:
        """Process a report of the agent of `node`. The report is about a rank or about the node itself.

        Raises:
            WireError: the report is an event that lacks required fields.
        """
        if isinstance(report, c.Join | c.Died | c.Failed) and self._membership.rescaling.is_joining(report.rank, node):
            self._joining(report)
        elif isinstance(report, c.Died | c.Failed):
            self._failed(node, report)
        elif isinstance(report, c.Event):
            self._event(node, report)
        elif isinstance(report, c.NodeJoin):
            disk = [Offer.of_disk(encode(one), node, self._run.name) for one in report.disk.snapshots]
            self._membership.restoring.look_at_disk(node, report.disk.generation, report.disk.problems)
            if report.disk.problems:
                steps = sorted({offer.step for offer in disk})
                self._log("durable", node=node, steps=steps, problems=report.disk.problems)
            self._join(node, joins_of(report), HeldOffers(report.held, node, report.pieces, disk))
        elif report.rank < 0:
            self._of_node(node, report)
        # skip reports from a node about a rank that has moved to another node
        elif self._membership.nodes.get(report.rank) == node:
            self._of_rank(node, report)

    def _of_rank(self, node: int, report: c.FromAgent) -> None:
        membership, carry_out = self._membership, self._actions.carry_out
        match report:
            case c.Join():
                self._join(node, [report], ())
            case c.Restored(generation=generation, rank=rank, attempt=attempt, error=error, ranks=ranks):
                if error:
                    self._log("restore_failed", rank=rank, attempt=attempt, error=error)
                for each in ranks or (rank,):
                    if membership.nodes.get(each) == node:
                        carry_out(membership.restore_reported(each, generation, attempt, error))
            case c.Finished(generation=generation, rank=rank, digest=digest):
                self._log("done", rank=rank, digest=digest)
                carry_out(membership.finished(rank, generation, digest))
            case c.Exited(rank=rank, code=code, last_line=last_line):
                self._end.exited(rank, code, last_line)
            case c.StopAnswer():
                self._stop_answered(report)
            case c.RankStopped():
                self._stopped(report)

    def _of_node(self, node: int, report: c.FromAgent) -> None:
        membership, carry_out = self._membership, self._actions.carry_out
        match report:
            case c.Decommissioned(held=held, pieces=pieces):
                carry_out(membership.decommissioned(node, _offers(held, pieces, node)))
            case c.DurableAnswer():
                self._durable_answered(report)
            case c.Alive(generation=generation) if self._liveness is not None and self._is_under_way(generation):
                if (fault := self._liveness.alive(node, generation)) is not None:
                    self._fault(fault, generation, time.monotonic())
            case c.Stalled(limit_s=limit_s):
                if self._hangs.stalled(limit_s):
                    self._outbox.to_all(c.AskHeartbeats())
            case c.Heartbeats(heartbeats=heartbeats):
                seen = [Heartbeat.from_json(encode(heartbeat)) for heartbeat in heartbeats]
                if (hang := self._hangs.answered(seen, len(membership.nodes))) is not None:
                    self._end_hung(hang)
            case c.ServesPeers(peer=peer):
                # the node has a new memory server, whose address other nodes need
                if self._members.serves_peers(node, peer):
                    self._outbox.share_job_state()
            case c.LookUp(generation=generation, ranks=ranks) if generation == membership.generation:
                addresses = self._ranks.addresses_of(ranks)
                self._outbox.send(node, c.Addresses(generation=generation, addresses=addresses))
            case c.Leave():
                self._leaves(node)
            case c.HoldTraining(for_fault=for_fault):
                carry_out(membership.hold(node, for_fault=for_fault))
            case c.ResumeTraining(nodes=nodes, gone=gone):
                self._resume(node, nodes, gone)
            case c.CancelJob():
                self._end.cancel()
            case c.NodeBroken():
                self._broken(node, report)

    def _leaves(self, node: int) -> None:
        """Let `node` leave the job at most `_TOGETHER_S` seconds after its request. If all nodes with ranks request to
        leave within `_TOGETHER_S` seconds, the job is cancelled instead, after a common step that all ranks save."""
        self._leaving.add(node)
        if self._all_leave(self._leaving):
            self._let_leave()
        elif len(self._leaving) == 1:
            asyncio.get_running_loop().call_later(_TOGETHER_S, self._let_leave)

    def _all_leave(self, leaving: Set[int]) -> bool:
        """Return whether all nodes with ranks are in `leaving`. The numbers of nodes are compared first, because that
        is fast even if thousands of nodes leave."""
        ranks, each = self._membership.nodes, self._run.config.workers_per_node
        return len(leaving) * each >= len(ranks) and leaving >= set(ranks.values())

    def _let_leave(self) -> None:
        leaving, self._leaving = self._leaving, set()
        if self._end.is_ending:
            return
        if self._all_leave(leaving):
            self._end.cancel()
            return
        for node in sorted(leaving & self._members.agents.keys()):
            self._actions.carry_out(self._membership.leave(node))

    def _resume(self, node: int, nodes: int, gone: Collection[str]) -> None:
        """End the hold that `node` has on training, and continue on `nodes` nodes, as the HyperPod operator has
        requested. `gone`: addresses of removed nodes."""
        if lost := self._members.lost_while_held:
            self._members.lost_while_held = set()
            if nodes > len(self._members.members):
                self._lost_nodes.lose_majority(lost | self._members.members.keys())
                return
        leaving = {its for its, member in self._members.members.items() if member["address"][0] in gone}
        self._actions.carry_out(self._membership.resume(node, nodes, leaving))

    def late_ranks(self, now: float) -> None:
        """Record a fault for each missing rank if the generation has not formed in time. Only the first fault on each
        node counts against the restart limits."""
        if self._end.ended.done() or not self._formation.is_late(now):
            return
        membership, blamed = self._membership, set[int]()
        generation, step = membership.generation, membership.committed + 1
        cause = f"was not ready for generation {generation} within {self._formation.limit_s:g} s"
        for missing, node in [(rank, membership.nodes[rank]) for rank in membership.missing()]:
            # an earlier iteration may have given the ranks new numbers
            rank = membership.renumbering.rank_now(missing, generation)
            if rank is None or membership.nodes.get(rank) != node or membership.phase is JobPhase.ENDED:
                continue  # record no fault: a spare has the rank now, or the job has ended
            fault = Fault(rank, cause, step, died=True, kind="late", late=node in blamed)
            self._fault(fault, generation, now)
            blamed.add(node)

    # --- a generation forms -----------------------------------------------------------------------

    def _join(self, node: int, joins: Iterable[c.Join | RankJoin], held: Collection[Offer]) -> None:
        """Record that ranks of `node` wait for the next generation. `held`: offers of the snapshots in the node's
        memory and on its disks."""
        host = self._members.members[node]["peer"][0]
        for join in joins:
            rank, live = join.rank, join.live
            if self._membership.nodes.get(rank) != node:
                continue
            if self._actions.resize_clock.joined(rank, join.pid) or is_sampled(rank):
                self._log("joined", rank=rank, pid=join.pid, live_step=live and live.step)
            self._ranks.stores[rank] = host, join.store_port
            offer = _live_offer(rank, node, live) if live is not None else None
            self._actions.carry_out(self._membership.join(rank, offer, held))
            self._end.anybody_joined = True
        self._end.check_exits()

    def _joining(self, report: c.Join | c.Died | c.Failed) -> None:
        """Process a report of a worker that was started for the next rank assignment."""
        if isinstance(report, c.Join):
            self._log("joining_worker_ready", rank=report.rank, pid=report.pid)
            self._actions.carry_out(self._membership.prepared(report.rank))
        else:
            self._log("joining_worker_lost", rank=report.rank, cause=report.cause)
            self._actions.carry_out(self._membership.not_prepared(report.rank, report.cause))

    def _durable_answered(self, report: c.DurableAnswer) -> None:
        stored = [Offer.of_all(encode(checkpoint)) for checkpoint in report.checkpoints]
        self._log("durable", steps=[offer.step for offer in stored], problems=report.problems)
        if not self._membership.restoring.awaits(report.exclude):
            return  # ignore the answer, which is for a query of an earlier generation
        if self._actions.durable.answered(reached=not report.unreachable):
            newest = report.newest_generation
            answer = self._membership.durable_answered(stored, newest, report.problems, report.unreachable)
            self._actions.carry_out(answer)

    # --- events -----------------------------------------------------------------------------------

    def _event(self, node: int, report: c.Event) -> None:
        event, its = report.event, self._membership.nodes.get(report.rank) == node
        step = read(_OfStep, report.fields, f"event `{event}`") if event in _OF_STEPS and report.rank >= 0 else None
        if step is not None and its and event in ("begun", "step"):
            self._stepped(report, step)
        elif step is not None and its and event == "script_saved":
            self._membership.step_committed(step.step)
        number = {"rank": report.rank} if report.rank >= 0 else {}
        reported = {key: value for key, value in report.fields.items() if key not in _OWN}
        fields = {"generation": report.generation, **reported, **number}
        if self._schedule.heard({"event": event, "t": report.t, **fields}, time.monotonic()):
            # send the new interval to the candidates: without it, the next coordinator would measure again
            self._outbox.share_job_state()
        if self._goes_to_log(report, fields):
            self._log(event, t=report.t, **fields)
        if event == "step" and step is not None:
            resized = self._actions.resize_clock.stepped(report.generation, step.step, step.began, report.t)
            if resized is not None:
                self._log("resized", **resized)
        elif event == "collective_broke" and step is not None and its:
            self._ask_who_lives(report, step)

    def _goes_to_log(self, report: c.Event, fields: Iterable[str]) -> bool:
        if report.event == "step":
            return self._step_sampler.takes(report.rank, report.generation, fields)
        return report.event not in _OF_SAMPLED or is_sampled(report.rank)

    def _stepped(self, report: c.Event, of: _OfStep) -> None:
        """Process the report of a committed step (event `step`), or of the start of a rank's training loop (event
        `begun`)."""
        membership = self._membership
        if self._run.config.restarts_script:
            # a script that saves its own state commits a step by saving the step (event `script_saved`)
            self._check_loaded(report, of)
            return
        membership.step_committed(of.step)
        self._ranks.committed(report.rank, of.step)
        if report.event == "begun":
            membership.sharing = of.sharing
            self._schedule.replicated = of.sharing == "same"
        for kind, due in self._schedule.due(self._ranks, membership, time.monotonic()):
            self._outbox.to_all(c.ScheduleSave(kind=kind, step=due))
        if report.event == "begun" or not membership.releases_at(of.step):
            return
        if (by_all := self._ranks.committed_by_all(len(membership.nodes))) is not None:
            self._actions.carry_out(membership.release_retained(by_all))

    def _check_loaded(self, report: c.Event, of: _OfStep) -> None:
        """Fail the job if two ranks report that the script has loaded checkpoints of different steps."""
        if report.event != "begun" or of.loaded is None:
            return
        generation, rank, step = self._loaded or (-1, -1, -1)
        if generation != report.generation:
            self._loaded = report.generation, report.rank, of.loaded
        elif step != of.loaded:
            message = (
                f"rank {report.rank} has loaded its checkpoint of step {of.loaded}, and rank {rank} that of step {step}"
            )
            hint = "Save each step to its own file, and load the newest step that all ranks have saved."
            self._end.fail(Fail("JobFailedError", message, hint))

    # --- faults -----------------------------------------------------------------------------------

    def _failed(self, node: int, report: c.Died | c.Failed) -> None:
        """Process the death of a rank's process, or an exception in its training function."""
        membership = self._membership
        rank = membership.renumbering.rank_now(report.rank, report.generation)
        if rank is None or membership.nodes.get(rank) != node:
            return
        died = isinstance(report, c.Died) or report.process_unusable
        if isinstance(report, c.Died) and membership.phase is JobPhase.ENDED:
            self._end.exited(rank, report.exit_code or 1)  # training is done, so record only that the process failed
            return
        fault = Fault(
            rank,
            report.cause,
            report.step,  # for a dead process, `report.step` is the last step that the process has reported
            died,
            report.kind,
            # a process that cannot start ends the job only if training has never begun
            final=report.final and not (isinstance(report, c.Died) and membership.began),
            code=report.code,
            hint=report.hint,
            place=report.place,
        )
        self._fault(fault, self._generation_of(report), report.t, report.phase)

    def _generation_of(self, report: c.Died | c.Failed) -> int:
        """Return the generation in which the fault occurred. The report contains the generation of the rank's agent.
        If the agent's generation has not begun, the generation that the rank joined before is returned, because the
        rank may still be in it."""
        if self._is_under_way(report.generation):
            return report.generation
        return report.joined or report.generation

    def _end_hung(self, hang: Hang) -> None:
        """Order agents to kill the processes of the hung ranks. If the hang cannot be attributed to any rank, abort the
        generation instead."""
        membership = self._membership
        for rank in hang.ranks:
            self._outbox.send(membership.nodes[rank], c.EndHung(rank=rank, cause=hang.cause))
        # do not abort for a hang in an older generation, which was already aborted
        generation = hang.first.generation
        if not hang.ranks and generation == membership.generation:
            rank, step, phase = min(membership.nodes), membership.committed + 1, hang.first.phase.word
            fault = Fault(rank, hang.cause, step, died=False, kind="stalled", place=phase)
            self._fault(fault, generation, time.monotonic(), phase)

    def _ask_who_lives(self, report: c.Event, of: _OfStep) -> None:
        """Ask all agents whether their ranks are alive, because a collective failed without a reported cause."""
        generation = report.generation
        asked = self._liveness is not None and self._liveness.generation == generation
        if asked or not self._is_under_way(generation):
            return
        fault = Fault(report.rank, of.cause, of.step, died=False, kind="connection")
        # wait for the answers of all nodes with ranks, even of disconnected nodes, which may be lost
        self._liveness = LivenessQuery(generation, fault, set(self._membership.nodes.values()))
        self._outbox.to_all(c.AskAlive(generation=generation))

    def agent_came(self, node: int) -> None:
        """Send the pending liveness query to a node that connects, because it may have missed the query."""
        query = self._liveness
        if query is not None and node in query.missing and self._is_under_way(query.generation):
            self._outbox.send(node, c.AskAlive(generation=query.generation))

    def _fault(self, fault: Fault, generation: int, seen: float, phase: str = "") -> None:
        membership = self._membership
        node, before = membership.nodes[fault.rank], len(membership.faults)
        actions = membership.fault(replace(fault, at=time.time()), generation)
        counted = membership.faults[-1] if len(membership.faults) > before else None
        escalation_level = counted.level.value if counted is not None and counted.level else ""
        fields = {"rank": fault.rank, "node": node, "step": fault.step, "cause": fault.cause, "died": fault.died}
        fields |= {"late": True} if counted is not None and counted.late else {}
        self._log("fault", t=seen, **fields, phase=phase, kind=fault.kind, escalation_level=escalation_level)
        self._actions.carry_out(actions)

    def _is_under_way(self, generation: int) -> bool:
        membership = self._membership
        return generation == membership.generation and membership.phase in (JobPhase.RESTORING, JobPhase.RUNNING)

    def _broken(self, node: int, report: c.NodeBroken) -> None:
        """Replace a node that has reported that it is broken, if the report allows it and a spare is left; otherwise
        fail the job."""
        spares = self._run.config.spares
        if report.lost and self._formation.job_has_begun and self._membership.spares_left(spares):
            self._lost_nodes.give_up(node, report.cause)
        else:
            self._end.fail(Fail(report.code, f"node {node}: {report.cause}"))

    # --- ranks stop -------------------------------------------------------------------------------

    def _stop_answered(self, report: c.StopAnswer) -> None:
        answer = report.rank, report.number, report.can, report.at, report.over
        if self._end.is_stopping:
            self._end.stop_answered(*answer)
        else:
            self._actions.carry_out(self._membership.stop_answered(*answer))

    def _stopped(self, report: c.RankStopped) -> None:
        if self._end.is_stopping:
            self._end.stopped(report.rank, report.number)
            return
        self._log("rank_stopped", rank=report.rank, step=report.step)
        self._actions.carry_out(self._membership.stopped(report.rank, report.number))


def _live_offer(rank: int, node: int, live: c.LiveState) -> Offer:
    return Offer(
        "live",
        live.step,
        rank,
        node,
        live.save_id,
        own_digest=live.own_digest,
        sharing=live.sharing,
        world_size=live.world_size,
    )


def _offers(held: Iterable[c.HeldSnapshot], pieces: Iterable[c.HeldPiece], node: int) -> list[Offer]:
    of_pieces = [Offer.of_piece(encode(piece), node) for piece in pieces]
    return [Offer.of_memory(encode(snapshot), node) for snapshot in held] + of_pieces
