"""What agents report, most of it passed on from their workers, becomes events of the membership."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hyperpod_ext.runtime.coordinator.actions import Actions
from hyperpod_ext.runtime.coordinator.job_end import JobEnd
from hyperpod_ext.runtime.coordinator.job_run import Formation, JobRun, Ranks
from hyperpod_ext.runtime.coordinator.members import Members
from hyperpod_ext.runtime.coordinator.outbox import Outbox
from hyperpod_ext.runtime.coordinator.queries import HangQuery, LivenessQuery
from hyperpod_ext.runtime.coordinator.save_schedule import SaveSchedule
from hyperpod_ext.runtime.detection.hangs import Hang
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.membership.actions import Fail, Fault, Phase
from hyperpod_ext.runtime.membership.membership import Membership
from hyperpod_ext.runtime.snapshot.select import Offer


class Reports:
    """Takes reports.

    `give_way`: takes a node that cannot go on, and why.
    """

    def __init__(
        self,
        run: JobRun,
        members: Members,
        membership: Membership,
        outbox: Outbox,
        ranks: Ranks,
        schedule: SaveSchedule,
        formation: Formation,
        end: JobEnd,
        actions: Actions,
        log: Callable[..., None],
        give_way: Callable[[int, str], None],
    ) -> None:
        self._run, self._members, self._membership, self._outbox = run, members, membership, outbox
        self._ranks, self._schedule, self._formation, self._end = ranks, schedule, formation, end
        self._actions, self._log, self._give_way = actions, log, give_way
        self._hangs = HangQuery()
        self._liveness: LivenessQuery | None = None

    def take(self, node: int, rank: int, generation: int, message: wire.Message) -> None:
        """One report of the agent of `node`, on a rank of `generation` or on itself."""
        membership, carry_out = self._membership, self._actions.carry_out
        if membership.rescaling.is_joining(rank, node) and message["type"] in ("join", "died", "failed"):
            self._joining(rank, message)
            return
        match message["type"]:
            case "join" if membership.nodes.get(rank) == node:
                self._join(node, rank, message)
            case "retired":
                carry_out(membership.decommissioned(node, _held(message, node)))
            case "durable":
                self._durable_answered(message)
            case "restored":
                attempt, error = int(message["attempt"]), str(message["error"])
                if error:
                    self._log("restore_failed", rank=rank, attempt=attempt, error=error)
                carry_out(membership.restore_reported(rank, generation, attempt, error))
            case "finished":
                self._log("done", rank=rank, digest=message["digest"])
                carry_out(membership.finished(rank, generation, message["digest"]))
            case "failed" | "died":
                now = membership.renumbering.rank_now(rank, generation)
                if now is not None and membership.nodes.get(now) == node:
                    self._failed(message, now, generation)
            case "event":
                self._event(rank, generation, message)
            case "present" if self._liveness is not None and self._is_under_way(generation):
                if (fault := self._liveness.alive(node, generation)) is not None:
                    self._fault(fault, generation, time.monotonic())
            case "stalled":
                if self._hangs.stalled(message):
                    self._outbox.to_agents({"type": "look"})
            case "signs":
                if (hang := self._hangs.answered(message, len(membership.nodes))) is not None:
                    self._end_hung(hang)
            case "exited":
                self._end.exited(rank, int(message["code"]))
            case "stop_answer":
                self._stop_answered(rank, message)
            case "halted":
                self._stopped(rank, message)
            case "serves":  # its memory server is another one
                if (member := self._members.members.get(node)) is not None:
                    member["peer"] = message["peer"]
                    self._outbox.share_record()
            case "leave":
                carry_out(membership.leave(node))
            case "cancel":
                self._end.cancel()
            case "broken":
                self._broken(node, message)

    def late_ranks(self, now: float) -> None:
        """A generation that does not form is a fault of those that are missing."""
        if self._end.ended.done() or not self._formation.is_late(now):
            return
        generation, step = self._membership.generation, self._membership.committed + 1
        cause = f"was not ready for generation {generation} within {self._formation.limit_s:g} s"
        for rank in self._membership.missing():
            self._fault(Fault(rank, cause, step, died=True, kind="late"), generation, now)

    # --- a generation forms -----------------------------------------------------------------------

    def _join(self, node: int, rank: int, message: wire.Message) -> None:
        live, pid = message["live"], int(message["pid"])
        self._log("joined", rank=rank, pid=message["pid"], live_step=live and live["step"])
        self._actions.resize_clock.joined(rank, pid)
        self._ranks.stores[rank] = self._members.table("peer")[node][0], int(message["store_port"])
        offer = Offer("live", rank=rank, node=node, **live) if live else None
        self._actions.carry_out(self._membership.join(rank, offer, _held(message, node)))
        self._end.anybody_joined = True
        self._end.check_exits()

    def _joining(self, rank: int, message: wire.Message) -> None:
        """Of a worker that waits for the next rank assignment."""
        if message["type"] == "join":
            self._log("newcomer", rank=rank, pid=message["pid"])
            self._actions.carry_out(self._membership.prepared(rank))
        else:
            self._log("newcomer_lost", rank=rank, cause=message["cause"])
            self._actions.carry_out(self._membership.not_prepared(rank, str(message["cause"])))

    def _durable_answered(self, message: wire.Message) -> None:
        stored = [Offer.of_all(brief) for brief in message["checkpoints"]]
        self._log("durable", steps=[offer.step for offer in stored], problems=message["problems"])
        problems, unreachable = (tuple(map(str, message[key])) for key in ("problems", "unreachable"))
        if self._actions.durable.answered(reached=not unreachable):
            newest = int(message["newest_generation"])
            self._actions.carry_out(self._membership.durable_answered(stored, newest, problems, unreachable))

    # --- events -----------------------------------------------------------------------------------

    def _event(self, rank: int, generation: int, message: wire.Message) -> None:
        event = message["event"]
        if event in ("begun", "step"):
            self._stepped(rank, message)
        self._schedule.heard(message, time.monotonic())
        fields = {key: value for key, value in message.items() if key not in ("type", "event", "t")}
        self._log(event, t=float(message["t"]), **fields)
        if event == "step" and (resized := self._actions.resize_clock.stepped(message)) is not None:
            self._log("resized", **resized)
        elif event == "collective_broke":
            self._ask_who_lives(rank, generation, message)

    def _stepped(self, rank: int, message: wire.Message) -> None:
        """A rank has begun its loop, or has committed a step."""
        membership, step = self._membership, int(message["step"])
        membership.step_committed(step)
        self._ranks.steps[rank] = step
        if message["event"] == "begun":
            membership.sharded = message.get("sharing") == "shard"
            self._schedule.replicated = message.get("sharing") == "same"
        for kind, due in self._schedule.due(self._ranks, membership, time.monotonic()):
            self._outbox.to_agents({"type": "drain_at", "kind": kind, "step": due})
        if message["event"] == "begun" or not membership.states.going:
            return
        if (by_all := self._ranks.committed_by_all(len(membership.nodes))) is not None:
            self._actions.carry_out(membership.release_retained(by_all))

    # --- faults -----------------------------------------------------------------------------------

    def _failed(self, message: wire.Message, rank: int, generation: int) -> None:
        """A rank's process has died, or its training function has raised."""
        died = message["type"] == "died"
        if died and self._membership.phase is Phase.ENDED:
            self._end.exited(rank, int(message["exit_code"]) or 1)  # after its training was done, but not by itself
            return
        fault = Fault(
            rank,
            str(message["cause"]),
            # what a process was making when it died, nobody knows better than its own last report
            int(message["step"]),
            died,
            message.get("kind", "exit"),
            final=bool(message["final"]),
            code=str(message.get("code", "JobFailedError")),
            hint=str(message.get("hint", "")),
            place=str(message.get("place", "")),
        )
        self._fault(fault, generation, float(message["t"]), str(message.get("phase", "")))

    def _end_hung(self, hang: Hang) -> None:
        """Have those that hang ended, or, where nobody is to blame, all leave the generation."""
        membership = self._membership
        for rank in hang.ranks:
            self._outbox.send(membership.nodes[rank], {"type": "end_hung", "rank": rank, "cause": hang.cause})
        generation = hang.first.generation  # ranks that have yet to leave for it say what is known already
        if not hang.ranks and generation == membership.generation:
            rank, step, phase = min(membership.nodes), membership.committed + 1, hang.first.phase.word
            fault = Fault(rank, hang.cause, step, died=False, kind="stalled", place=phase)
            self._fault(fault, generation, time.monotonic(), phase)

    def _ask_who_lives(self, rank: int, generation: int, message: wire.Message) -> None:
        """A rank's connection has ended, and nobody has said why: does everybody live?"""
        asked = self._liveness is not None and self._liveness.generation == generation
        if asked or not self._is_under_way(generation):
            return
        fault = Fault(rank, str(message["cause"]), int(message["step"]), died=False, kind="connection")
        self._liveness = LivenessQuery(generation, fault, set(self._members.agents))
        self._outbox.to_workers("roll_call")

    def _fault(self, fault: Fault, generation: int, seen: float, phase: str = "") -> None:
        membership = self._membership
        node, before = membership.nodes[fault.rank], len(membership.faults)
        actions = membership.fault(fault, generation)
        level = membership.faults[-1].level if len(membership.faults) > before else None
        fields = {"rank": fault.rank, "node": node, "step": fault.step, "cause": fault.cause, "died": fault.died}
        self._log("fault", t=seen, **fields, phase=phase, kind=fault.kind, rung=level.value if level else "")
        self._actions.carry_out(actions)

    def _is_under_way(self, generation: int) -> bool:
        membership = self._membership
        return generation == membership.generation and membership.phase in (Phase.RESTORING, Phase.RUNNING)

    def _broken(self, node: int, message: wire.Message) -> None:
        """A node cannot go on: a spare takes its place, or the job ends."""
        cause, spares = str(message["cause"]), self._run.config.spares
        if message["lost"] and self._formation.job_has_begun and self._membership.spares_left(spares):
            self._give_way(node, cause)
        else:
            self._end.fail(Fail(str(message.get("code", "JobFailedError")), f"node {node}: {cause}"))

    # --- ranks stop -------------------------------------------------------------------------------

    def _stop_answered(self, rank: int, message: wire.Message) -> None:
        number, can, making, over = int(message["number"]), bool(message["can"]), int(message["at"]), message["over"]
        if self._end.is_stopping:
            self._end.stop_answered(rank, number, can, making, bool(over))
        else:
            self._actions.carry_out(self._membership.stop_answered(rank, number, can, making, bool(over)))

    def _stopped(self, rank: int, message: wire.Message) -> None:
        if self._end.is_stopping:
            self._end.stopped(rank, int(message["number"]))
            return
        self._log("halted", rank=rank, step=message["step"])
        self._actions.carry_out(self._membership.stopped(rank, int(message["number"])))


def _held(message: wire.Message, node: int) -> list[Any]:
    return [Offer.of_memory(brief, node) for brief in message["held"]]
