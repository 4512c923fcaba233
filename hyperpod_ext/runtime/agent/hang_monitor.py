"""An agent's eye on its workers: reads heartbeats, times steps, and ends who hangs, with its stacks in the log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hyperpod_ext.config.fault_injection import NodeFault
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.detection.failure_causes import NO_PROGRESS, FaultKind, OomKills, decode_exit
from hyperpod_ext.runtime.detection.hangs import Heartbeat, StepTimes, silent_too_long
from hyperpod_ext.runtime.detection.heartbeat import ENV_HEARTBEAT, IN_STEP, HeartbeatPage, Phase
from hyperpod_ext.runtime.detection.stacks import dump_stacks, line_in_script, state_of
from hyperpod_ext.runtime.fault_injection.orders import read_orders, take
from hyperpod_ext.runtime.ipc import control_messages as c

_LOOK_S = 0.25
_AFTER_S = 0.01
"""How long after a rank's time is used up it is looked."""
_SIGNALS = {"sigkill": signal.SIGKILL, "sigsegv": signal.SIGSEGV, "hang": signal.SIGSTOP}
"""Ordered faults that need no place in a step: inflicted from outside, at once."""

Tell = Callable[[c.Stalled | c.Heartbeats], None]
Log = Callable[..., None]
Thing = TypeVar("Thing")


@dataclass(slots=True)
class _MonitoredWorker:
    """One worker's process."""

    pid: int
    log: Path
    heartbeat: HeartbeatPage
    collectives: int = 0
    collectives_at: float = 0.0
    steps: int = 0
    """Steps it has made in its generation."""
    kill_reason: str = ""
    """Why it is being ended by us."""
    kind: FaultKind | None = None
    """What that is, where the reason does not say so itself."""
    place: tuple[int, str] | None = None
    """Step and phase it was in when that was decided; a process that was stopped runs on for a moment."""
    ending: set[asyncio.Task[None]] = field(default_factory=set)


class HangMonitor:
    """Watches the workers of one node.

    Args:
        tell, event: messages and events for the coordinator.
    """

    def __init__(
        self, config: RuntimeConfig, run_dir: Path, socket_dir: Path, node: int, tell: Tell, event: Log
    ) -> None:
        self._policy = config.restart.hang
        self._run_dir, self._socket_dir, self._node = run_dir, socket_dir, node
        self._tell, self._event = tell, event
        self._times = StepTimes(self._policy)
        self._heartbeats: dict[int, HeartbeatPage] = {}
        self._started = 0
        self._workers: dict[int, _MonitoredWorker] = {}
        self._oom_kills = OomKills()
        self._ordered: set[str] = set()
        """Orders for ranks here that the event log tells of."""
        self.on_node_fault: Callable[[NodeFault], None] = lambda fault: None
        """Carries out a fault of the whole node that was ordered."""

    # --- what happens to workers ----------------------------------------------------------------

    def environ(self, rank: int) -> dict[str, str]:
        """Variables for a worker that is about to be started, and a fresh page for its heartbeat."""
        self._started += 1  # the page of a rank that has another number by now is still in use
        path = self._socket_dir / f"node{self._node}.{self._started}.heartbeat"
        self._heartbeats[rank] = HeartbeatPage.create(path)
        if read_orders(self._run_dir):
            self._heartbeats[rank].order()
        return {ENV_HEARTBEAT: self._heartbeats[rank].path}

    def started(self, rank: int, pid: int, log: Path) -> None:
        self._workers[rank] = _MonitoredWorker(pid, log, self._heartbeats[rank])

    def forget(self, rank: int) -> None:
        """A worker has been ended that nobody needs to hear of."""
        self._workers.pop(rank, None)
        self._heartbeats.pop(rank, None)

    def renumber(self, moved: Mapping[int, int]) -> None:
        """Workers have got other numbers; those that are not named keep theirs."""
        self._heartbeats = _renumbered(self._heartbeats, moved)
        self._workers = _renumbered(self._workers, moved)

    def heard(self, rank: int, report: c.Event) -> None:
        """A worker told of a step, or that it begins to make steps."""
        worker, began = self._workers.get(rank), report.fields.get("began")
        if worker is None:
            return
        if report.event == "begun":
            worker.steps = 0
        elif report.event == "step" and isinstance(began, int | float):
            self._times.add(report.t - began, first=worker.steps == 0)
            worker.steps += 1

    def phase(self, rank: int) -> str:
        """What a rank is doing, or did last; empty when it never told."""
        heartbeat = self._heartbeats.get(rank)
        reading = heartbeat.read() if heartbeat is not None else None
        return reading.phase.word if reading is not None and reading.marks else ""

    def exit_cause(self, rank: int, status: int, step: int, last_log_line: str) -> dict[str, Any]:
        """Why a worker's process has ended, and where: fields of the news of its death. `step`: as it told last."""
        worker = self._workers.pop(rank, None)
        kill_reason = worker.kill_reason if worker is not None else ""
        exit_cause = decode_exit(
            status, kill_reason=kill_reason, last_log_line=last_log_line, oom=self._oom_kills.since_last()
        )
        kind = worker.kind if worker is not None and worker.kind else exit_cause.kind
        step, phase = worker.place if worker is not None and worker.place else (step, self.phase(rank))
        # the last line of a process that exits is another one each time
        place = phase if kind in NO_PROGRESS else f"status {status}" if kind == "exit" else ""
        return {"cause": exit_cause.cause, "kind": kind, "step": step, "phase": phase, "place": place}

    # --- what is looked at, a few times a second --------------------------------------------------

    async def run(self) -> None:
        """Look for as long as the node lives."""
        pause_s = _LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            self._carry_out_orders()
            if self._policy.enabled:
                pause_s = self._look()

    def heartbeats(self) -> list[Heartbeat]:
        """What is known of each worker now."""
        return [heartbeat for rank in self._workers if (heartbeat := self._heartbeat(rank)) is not None]

    def _heartbeat(self, rank: int) -> Heartbeat | None:
        worker, now = self._workers[rank], time.monotonic()
        reading = worker.heartbeat.read()
        if not reading.marks:
            return None  # it has not come to the training function yet
        if reading.collectives != worker.collectives:
            worker.collectives, worker.collectives_at = reading.collectives, reading.beat_at
        since = max(reading.marked_at, worker.collectives_at)
        return Heartbeat.of(rank, reading, quiet_since=since, stopped=state_of(worker.pid) == "T", now=now)

    def _look(self) -> float:
        """Seconds to the next look: sooner than usual where some rank will have used up its time by then."""
        pauses = [_LOOK_S]
        for heartbeat in self.heartbeats():
            worker = self._workers[heartbeat.rank]
            if worker.kill_reason:
                continue
            if cause := silent_too_long(heartbeat, self._policy):
                self.end(heartbeat.rank, cause)
            elif heartbeat.phase in IN_STEP or heartbeat.phase is Phase.DONE:
                limit_s = self._times.limit_s(heartbeat.phase, first=worker.steps == 0)
                if heartbeat.quiet_s > limit_s:
                    self._tell(c.Stalled(limit_s=limit_s))
                    return _LOOK_S  # one is enough: everybody is asked
                pauses.append(limit_s - heartbeat.quiet_s + _AFTER_S)
        return min(pauses)

    def answer(self) -> None:
        """Tell what is known of every worker here; the coordinator has asked all agents."""
        self._tell(
            c.Heartbeats(heartbeats=tuple(c.RankHeartbeat(**heartbeat.to_json()) for heartbeat in self.heartbeats()))
        )

    def end(self, rank: int, cause: str, kind: FaultKind | None = None) -> None:
        """End a worker that hangs, its stacks first. Its death is then told like any other, with this cause."""
        worker = self._workers.get(rank)
        if worker is None or worker.kill_reason:
            return
        worker.kill_reason, worker.kind = cause, kind
        if (step := worker.heartbeat.read().step) > 0:
            worker.place = (step, self.phase(rank))
        task = asyncio.get_running_loop().create_task(self._end(rank, worker))
        worker.ending.add(task)
        task.add_done_callback(worker.ending.discard)

    async def _end(self, rank: int, worker: _MonitoredWorker) -> None:
        self._event("hung", rank=rank, cause=worker.kill_reason, phase=self.phase(rank))
        before = worker.log.stat().st_size if worker.log.exists() else 0
        dumped = await dump_stacks(worker.pid, worker.log, self._policy.dump_s)
        if where := line_in_script(worker.log, before):
            worker.kill_reason += f" ({where})"
        self._event("stacks", rank=rank, dumped=dumped, log=str(worker.log))
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)

    # --- faults that are ordered while the job runs -----------------------------------------------

    def _carry_out_orders(self) -> None:
        for name, fault in read_orders(self._run_dir).items():
            if isinstance(fault, NodeFault):
                if fault.node == self._node and take(self._run_dir, name):
                    self._event("injected", kind=fault.kind, node_fault=True)
                    self.on_node_fault(fault)
                continue
            worker = self._workers.get(fault.rank)
            if worker is None:
                continue
            at_once = fault.step is None and fault.phase is None and fault.how == "stop" and fault.kind in _SIGNALS
            if not at_once:
                worker.heartbeat.order()  # the worker looks for itself, at its next change of phase
                if name not in self._ordered:
                    self._ordered.add(name)
                    self._event("fault_ordered", rank=fault.rank, kind=fault.kind, step=fault.step)
            elif take(self._run_dir, name):
                self._event("injected", rank=fault.rank, kind=fault.kind, phase=self.phase(fault.rank))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, _SIGNALS[fault.kind])


def _renumbered(things: Mapping[int, Thing], moved: Mapping[int, int]) -> dict[int, Thing]:
    kept = {rank: thing for rank, thing in things.items() if rank not in moved and rank not in moved.values()}
    return kept | {moved[rank]: thing for rank, thing in things.items() if rank in moved}
