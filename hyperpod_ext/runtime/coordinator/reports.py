"""What agents report, most of it passed on from their workers, and what the membership makes of it."""

from __future__ import annotations

import time

from hyperpod_ext.runtime.coordinator.actions import Commander
from hyperpod_ext.runtime.coordinator.liveness_query import RollCall
from hyperpod_ext.runtime.detection.hangs import Hang
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.membership import membership as m
from hyperpod_ext.runtime.snapshot.select import Offer

_AHEAD = 2  # steps, of durable tiers: a checkpoint that a node hears of too late leaves the one before as it is


class Hearing(Commander):
    """Takes reports."""

    def _act(self, node: int, rank: int, generation: int, message: wire.Message) -> None:
        membership = self._membership
        if membership.is_coming(rank, node) and message["type"] in ("join", "died", "failed"):
            self._hear_newcomer(rank, message)
            return
        match message["type"]:
            case "join" if membership.nodes.get(rank) == node:
                live = message["live"]
                self._log("joined", rank=rank, pid=message["pid"], live_step=live and live["step"])
                if self._world is not None and rank in self._pids_before:
                    self._pids_after[rank] = int(message["pid"])
                self._pids[rank] = int(message["pid"])
                offer = Offer("live", rank=rank, node=node, **live) if live else None
                held = [Offer.of_memory(brief, node) for brief in message["held"]]
                self._stores[rank] = self._roster.table("peer")[node][0], int(message["store_port"])
                self._carry_out(membership.join(rank, offer, held))
                self._joined_once = True
                self._check_exits()
            case "retired":
                held = [Offer.of_memory(brief, node) for brief in message["held"]]
                self._carry_out(membership.retired(node, held))
            case "durable":
                self._durable_answered(message)
            case "restored":
                attempt, error = int(message["attempt"]), str(message["error"])
                if error:
                    self._log("restore_failed", rank=rank, attempt=attempt, error=error)
                self._carry_out(membership.restore_reported(rank, generation, attempt, error))
            case "finished":
                self._log("done", rank=rank, digest=message["digest"])
                self._carry_out(membership.finished(rank, generation, message["digest"]))
            case "failed" | "died":
                now = membership.rank_now(rank, generation)
                if now is not None and membership.nodes.get(now) == node:
                    self._fault(message, now, generation)
            case "event":
                if message["event"] in ("step", "begun"):
                    membership.step_committed(int(message["step"]))
                    self._steps[rank] = int(message["step"])
                    if message["event"] == "begun":
                        membership.sharded = message.get("sharing") == "shard"
                        self._same = message.get("sharing") == "same"
                    self._keep_time()
                    everybody = message["event"] == "step" and len(self._steps) == len(membership.nodes)
                    if membership.settling and everybody:
                        self._carry_out(membership.settle(min(self._steps.values())))
                for kind, seconds in self._tuner.heard(message, time.monotonic()).items():
                    self._log("tuned", tier=kind, every_seconds=round(seconds, 3))
                fields = {key: value for key, value in message.items() if key not in ("type", "event", "t")}
                self._log(message["event"], t=float(message["t"]), **fields)
                if message["event"] == "step":
                    self._time_resize(message)
                elif message["event"] == "collective_broke":
                    self._call_roll(rank, generation, message)
            case "present" if self._roll is not None and self._is_under_way(generation):
                if (fault := self._roll.present(node, generation)) is not None:
                    self._meet(fault, generation, time.monotonic())
            case "stalled":
                if self._inquest.stalled(message):
                    self._to_agents({"type": "look"})
            case "signs":
                if (hang := self._inquest.heard(message)) is not None:
                    self._end_hung(hang)
            case "exited":
                self._exit_codes[rank] = int(message["code"])
                self._check_exits()
            case "stop_answer" | "halted" if self._stopping is not None:
                self._stop_answered(rank, message)
            case "stop_answer":
                can, at, over = bool(message["can"]), int(message["at"]), bool(message["over"])
                self._carry_out(membership.stop_answered(rank, int(message["number"]), can, at, over))
            case "halted":
                self._log("halted", rank=rank, step=message["step"])
                self._carry_out(membership.halted(rank, int(message["number"])))
            case "serves":  # its memory server is another one
                if (member := self._roster.members.get(node)) is not None:
                    member["peer"] = message["peer"]
                    self._tell_record()
            case "leave":
                self._carry_out(membership.leave(node))
            case "cancel":
                self.cancel()
            case "broken" if message["lost"] and self._begun and membership.spares_left(self._config.spares):
                self._give_way(node, str(message["cause"]))
            case "broken":
                code = str(message.get("code", "JobFailedError"))
                self._fail(m.Fail(code, f"node {node}: {message['cause']}"))

    def _time_resize(self, message: wire.Message) -> None:
        """The first step of a new world ends the pause that began with the last one of the former."""
        world = self._world
        if world is None or int(message["generation"]) < int(world["generation"]):
            self._last_step_at = max(self._last_step_at, float(message["t"]))
            return
        self._world = None
        pause_s = round(max(0.0, float(message["began"]) - self._last_step_at), 4)
        step = int(message["step"]) - 1
        self._log("resized", **world, step=step, pause_s=pause_s, pids_kept=self._pids_before == self._pids_after)

    def _hear_newcomer(self, rank: int, message: wire.Message) -> None:
        """A worker that waits for the next world."""
        if message["type"] == "join":
            self._log("newcomer", rank=rank, pid=message["pid"])
            self._carry_out(self._membership.prepared(rank))
        else:
            self._log("newcomer_lost", rank=rank, cause=message["cause"])
            self._carry_out(self._membership.not_prepared(rank, str(message["cause"])))

    def _give_way(self, node: int, cause: str) -> None:
        """A node cannot go on, and says so itself."""
        raise NotImplementedError

    def _durable_answered(self, message: wire.Message) -> None:
        stored = [Offer.of_all(brief) for brief in message["checkpoints"]]
        self._log("durable", steps=[offer.step for offer in stored], problems=message["problems"])
        unreachable = tuple(str(problem) for problem in message["unreachable"])
        if unreachable and self._durable.again():
            return
        self._asked = -1
        problems = tuple(str(problem) for problem in message["problems"])
        newest_generation = int(message["newest_generation"])
        self._carry_out(self._membership.durable_answered(stored, newest_generation, problems, unreachable))

    def _keep_time(self) -> None:
        """Name the step that tiers which go by time get next. Ahead of it, so that every node hears in time."""
        for tier in self._config.checkpoint.tiers:
            now, last = time.monotonic(), self._drained_at.get(tier.kind, self._started)
            every = self._tuner.seconds(tier)
            if every is not None and now - last >= every:
                newest = max(self._steps.values())
                ahead = self._ahead_for_peers(newest) if tier.kind == "peer" else _AHEAD
                if ahead is None:
                    continue
                self._drained_at[tier.kind] = now
                step = self._policy.next_due(newest + ahead)
                if tier.kind == "peer":
                    self._peer_step = step
                self._to_agents({"type": "drain_at", "kind": tier.kind, "step": step})
                self._tuner.named(tier.kind, step)

    def _ahead_for_peers(self, newest: int) -> int | None:
        """How far ahead of the newest step one is named for copies on peers. None: there are no such copies, or the
        last step that was named is about to be made."""
        ahead, nodes = self._tuner.steps_ahead(), set(self._membership.nodes.values())
        if ahead is None or self._same or len(nodes) == 1:
            return None
        return None if newest < (self._peer_step or 0) <= newest + ahead else ahead

    def _fault(self, message: wire.Message, rank: int, generation: int) -> None:
        died = message["type"] == "died"
        if died and self._membership.phase is m.Phase.ENDED:
            self._exit_codes[rank] = int(message["exit_code"]) or 1  # after its training was done, but not by itself
            self._check_exits()
            return
        fault = m.Fault(
            rank,
            str(message["cause"]),
            # what a process was making when it died, nobody knows better than its own last report
            int(message["step"]),
            died,
            final=bool(message["final"]),
            code=str(message.get("code", "JobFailedError")),
            hint=str(message.get("hint", "")),
            kind=message.get("kind", "exit"),
            place=str(message.get("place", "")),
        )
        self._meet(fault, generation, float(message["t"]), str(message.get("phase", "")))

    def _end_hung(self, hang: Hang) -> None:
        """Have those that hang ended, or, where nobody is to blame, all leave the generation."""
        membership = self._membership
        for rank in hang.ranks:
            self._send(membership.nodes[rank], {"type": "end_hung", "rank": rank, "cause": hang.cause})
        generation = hang.first.generation  # ranks that have yet to leave for it say what is known already
        if not hang.ranks and generation == membership.generation:
            rank, step, phase = min(membership.nodes), membership.committed + 1, hang.first.phase.word
            fault = m.Fault(rank, hang.cause, step, died=False, kind="stalled", place=phase)
            self._meet(fault, generation, time.monotonic(), phase)

    def _meet(self, fault: m.Fault, generation: int, seen: float, phase: str = "") -> None:
        membership = self._membership
        node, before = membership.nodes[fault.rank], len(membership.faults)
        commands = membership.fault(fault, generation)
        met = membership.faults[-1].rung if len(membership.faults) > before else None
        fields = {"rank": fault.rank, "node": node, "step": fault.step, "cause": fault.cause, "died": fault.died}
        self._log("fault", t=seen, **fields, phase=phase, kind=fault.kind, rung=met.value if met else "")
        self._carry_out(commands)

    def _call_roll(self, rank: int, generation: int, message: wire.Message) -> None:
        """A rank's connection has ended, and nobody has said why: does everybody live?"""
        called = self._roll is not None and self._roll.generation == generation
        if called or not self._is_under_way(generation):
            return
        fault = m.Fault(rank, str(message["cause"]), int(message["step"]), died=False, kind="exception")
        self._roll = RollCall(generation, fault, set(self._roster.agents))
        self._to_workers("roll_call")

    def _is_under_way(self, generation: int) -> bool:
        membership = self._membership
        return generation == membership.generation and membership.phase in (m.Phase.RESTORING, m.Phase.RUNNING)

    def _look_for_late_ranks(self, now: float) -> None:
        """A generation that does not form is a fault of those that are missing."""
        limit = self._config.restart.form_timeout_s
        if not self._begun or self.ended.done() or now - self._forming_since < limit:
            return
        self._forming_since = now
        generation = self._membership.generation
        for rank in self._membership.missing():
            cause = f"was not ready for generation {generation} within {limit:g} s"
            self._meet(m.Fault(rank, cause, self._membership.committed + 1, died=True), generation, now)
