"""The hang monitor of a node: reads the heartbeats of the node's workers, compares them with the usual duration of
steps, and reports workers without progress. Makes a hung worker write its stack traces, and then kills it."""

from __future__ import annotations

import asyncio
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ext.config.detection import HangPolicy
from hyperpod_ext.config.fault_injection import NodeFault
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.processes import send_signal
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.detection.failure_causes import NO_PROGRESS, FaultKind, OomKills, decode_exit
from hyperpod_ext.runtime.detection.hangs import Heartbeat, StepTimes, silent_too_long
from hyperpod_ext.runtime.detection.heartbeat import IN_STEP, HeartbeatPage, Phase
from hyperpod_ext.runtime.detection.stacks import dump_stacks, line_in_script, state_of
from hyperpod_ext.runtime.fault_injection.orders import read_orders, take
from hyperpod_ext.runtime.ipc import control_messages as c

_LOOK_S = 0.25
_AFTER_S = 0.01
"""Number of seconds between the end of a rank's time limit and the next check of the rank's heartbeat."""
_SIGNALS = {"sigkill": signal.SIGKILL, "sigsegv": signal.SIGSEGV, "hang": signal.SIGSTOP}
"""Signals that the agent sends to workers to inject faults, by kind of fault."""


@dataclass(slots=True, kw_only=True, eq=False)
class MonitoredWorker:
    """The hang monitor's data on one worker process."""

    pid: int
    log: Path
    heartbeat: HeartbeatPage
    step: int = 0
    """Newest training step that the worker has begun, according to its reports."""
    collectives: int = 0
    """Number of collectives that the worker has begun, according to its newest heartbeat."""
    collectives_at: float = 0.0
    """Time at which `collectives` last changed, on the monotonic clock."""
    steps: int = 0
    """Number of steps that the worker has made in the current generation."""
    kill_reason: str = ""
    """Why this agent is killing the worker; empty if this agent is not killing it."""
    kind: FaultKind | None = None
    """Kind of fault to report when the worker ends; None to derive it from the exit status and `kill_reason`."""
    place: tuple[int, str] | None = None
    """Step and phase of the worker when this agent decided to kill it. The worker may continue for a moment after the
    decision."""
    ending: asyncio.Task[None] | None = None

    @property
    def phase(self) -> str:
        """Name of the worker's current phase; empty before its first phase."""
        reading = self.heartbeat.read()
        return reading.phase.word if reading.marks else ""


def _policy_of(config: RuntimeConfig) -> HangPolicy:
    """Return the job's hang policy. In mode `run`, every step's time limit is at least the limit for the first step,
    because a script may evaluate its model without showing progress."""
    policy = config.restart.hang
    if not config.restarts_script:
        return policy
    return policy.model_copy(update={"floor_s": max(policy.floor_s, policy.first_step_s)})


class HangMonitor:
    """Watches the heartbeats of the workers of one node.

    Args:
        workers: function that returns a map from rank to worker, for the workers of this node.
        tell: function that sends a report to the coordinator.
        event: function that sends an event to the coordinator.
    """

    def __init__(
        self,
        settings: NodeSettings,
        workers: Callable[[], Mapping[int, MonitoredWorker]],
        tell: Callable[[c.Stalled | c.Heartbeats], None],
        event: Callable[..., None],
    ) -> None:
        self._settings, self._policy = settings, _policy_of(settings.config)
        self._workers, self._tell, self._event = workers, tell, event
        self._times = StepTimes(self._policy)
        self._pages = 0
        self._living_pages = weakref.WeakSet[HeartbeatPage]()
        """Heartbeat pages of all workers whose end is not reported yet, and perhaps of some other ended workers."""
        self._saw_unprotected = False
        self._oom_kills = OomKills()
        self._ordered: set[str] = set()
        """Names of the ordered faults on ranks of this node for which an event is already in the event log."""
        self.on_node_fault: Callable[[NodeFault], None] = lambda fault: None
        """Function that injects an ordered fault that affects this whole node."""

    # --- start, reports and end of workers ------------------------------------------------------

    def new_page(self) -> HeartbeatPage:
        """Create a heartbeat page (a file of shared memory) for a new worker."""
        # each page has a new file name, because the rank's earlier page may still be in use
        self._pages += 1
        page = HeartbeatPage.create(self._settings.socket_dir / f"node{self._settings.node}.{self._pages}.heartbeat")
        if read_orders(self._settings.run_dir):
            page.order()
        self._living_pages.add(page)
        return page

    def heard(self, worker: MonitoredWorker, report: c.Event) -> None:
        """Record that a worker has made a step (event `step`), or has begun to train in a generation (event
        `begun`)."""
        began = report.fields.get("began")
        if report.event == "begun":
            worker.steps = 0
        elif report.event == "step" and isinstance(began, int | float):
            self._times.add(report.t - began, first=worker.steps == 0)
            worker.steps += 1

    def see_report(self, report: c.ToAgent | c.FromAgent) -> None:
        """If `report` reports a worker's end, first write the event about an unprotected step, because the job may end
        after the worker."""
        if isinstance(report, c.Exited | c.Died):
            self._log_unprotected()

    def exit_cause(self, worker: MonitoredWorker, status: int, last_log_line: str) -> dict[str, Any]:
        """Return why and where a worker process has ended, as fields of a `Died` report. `status`: wait status of the
        process."""
        oom = self._oom_kills.since_last()
        exit_cause = decode_exit(status, kill_reason=worker.kill_reason, last_log_line=last_log_line, oom=oom)
        kind = worker.kind or exit_cause.kind
        step, phase = worker.place or (worker.step, worker.phase)
        # leave the last log line out of `place`, because the line may differ each time that the fault repeats
        place = phase if kind in NO_PROGRESS else f"status {status}" if kind == "exit" else ""
        return {"cause": exit_cause.cause, "kind": kind, "step": step, "phase": phase, "place": place}

    # --- checks, a few times per second -----------------------------------------------------------

    async def run(self) -> None:
        pause_s = _LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            self._carry_out_orders()
            self._log_unprotected()
            if self._policy.enabled:
                pause_s = self._look()

    def _log_unprotected(self) -> None:
        """Write an event about the first unprotected optimizer step on this node (no checkpoint contains its changes),
        at most once."""
        if self._saw_unprotected:
            return
        found = [step for page in self._living_pages if (step := page.unprotected) is not None]
        if found:
            rank, when = min(found)
            self._saw_unprotected = True
            self._event("unprotected_step", rank=rank, t=when)

    def _heartbeats(self) -> Iterator[tuple[MonitoredWorker, Heartbeat]]:
        """Yield each worker that has reached the training function, with its heartbeat."""
        now = time.monotonic()
        for rank, worker in self._workers().items():
            if not (reading := worker.heartbeat.read()).marks:
                continue
            if reading.collectives != worker.collectives:
                worker.collectives, worker.collectives_at = reading.collectives, reading.beat_at
            since, stopped = max(reading.marked_at, worker.collectives_at), state_of(worker.pid) == "T"
            yield worker, Heartbeat.of(rank, reading, quiet_since=since, stopped=stopped, now=now)

    def _look(self) -> float:
        """Check the heartbeats of all workers once. Returns the number of seconds until the next check: less than usual
        if a rank reaches its time limit earlier."""
        pauses = [_LOOK_S]
        for worker, heartbeat in self._heartbeats():
            if worker.kill_reason:
                continue
            if cause := silent_too_long(heartbeat, self._policy):
                self.end(heartbeat.rank, cause)
            elif heartbeat.phase in IN_STEP or heartbeat.phase is Phase.DONE:
                limit_s = self._times.limit_s(heartbeat.phase, first=worker.steps == 0)
                if heartbeat.quiet_s > limit_s:
                    self._tell(c.Stalled(limit_s=limit_s))
                    # one report is enough, because the coordinator then queries all nodes for heartbeats
                    return _LOOK_S
                pauses.append(limit_s - heartbeat.quiet_s + _AFTER_S)
        return min(pauses)

    def answer(self) -> None:
        """Send the heartbeats of all workers on this node to the coordinator."""
        known = tuple(c.RankHeartbeat(**heartbeat.to_json()) for _, heartbeat in self._heartbeats())
        self._tell(c.Heartbeats(heartbeats=known))

    def end(self, rank: int, cause: str, kind: FaultKind | None = None) -> None:
        """Make a hung worker write its stack traces to its log, then kill the worker. The worker's end is reported as
        usual, with `cause`."""
        worker = self._workers().get(rank)
        if worker is None or worker.kill_reason:
            return
        worker.kill_reason, worker.kind = cause, kind
        if (step := worker.heartbeat.read().step) > 0:
            worker.place = (step, worker.phase)
        worker.ending = asyncio.get_running_loop().create_task(self._end(rank, worker))

    async def _end(self, rank: int, worker: MonitoredWorker) -> None:
        self._event("hung", rank=rank, cause=worker.kill_reason, phase=worker.phase)
        before = worker.log.stat().st_size if worker.log.exists() else 0
        dumped = await dump_stacks(worker.pid, worker.log, self._policy.dump_s)
        if where := line_in_script(worker.log, before):
            worker.kill_reason += f" ({where})"
        self._event("stacks", rank=rank, dumped=dumped, log=str(worker.log))
        send_signal(worker.pid)

    # --- faults ordered while the job runs ---------------------------------------------------------

    def _carry_out_orders(self) -> None:
        run_dir = self._settings.run_dir
        for name, fault in read_orders(run_dir).items():
            if isinstance(fault, NodeFault):
                if fault.node == self._settings.node and take(run_dir, name):
                    self._event("injected", kind=fault.kind, node_fault=True)
                    self.on_node_fault(fault)
                continue
            worker = self._workers().get(fault.rank)
            if worker is None:
                continue
            at_once = fault.step is None and fault.phase is None and fault.how == "stop" and fault.kind in _SIGNALS
            if not at_once:
                worker.heartbeat.order()  # the worker carries out the order at its next change of phase
                if name not in self._ordered:
                    self._ordered.add(name)
                    self._event("fault_ordered", rank=fault.rank, kind=fault.kind, step=fault.step)
            elif take(run_dir, name):
                self._event("injected", rank=fault.rank, kind=fault.kind, phase=worker.phase)
                send_signal(worker.pid, _SIGNALS[fault.kind])
