"""Starts and stops the worker processes of one node, and passes their reports on to the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperpod_ext.config.fault_injection import NodeFault
from hyperpod_ext.processes import kill_group, send_signal
from hyperpod_ext.runtime.agent.children import ForkServer
from hyperpod_ext.runtime.agent.hang_monitor import HangMonitor, MonitoredWorker
from hyperpod_ext.runtime.agent.memory_client import AsyncMemoryClient, held_in
from hyperpod_ext.runtime.agent.reports import Gathering
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.agent.worker_main import temporary_folder
from hyperpod_ext.runtime.coordinator.queries import all_live
from hyperpod_ext.runtime.detection.death_watch import LivenessLock, dying_of, has_gpu
from hyperpod_ext.runtime.detection.failure_causes import is_out_of_memory, last_line
from hyperpod_ext.runtime.detection.heartbeat import ENV_HEARTBEAT
from hyperpod_ext.runtime.fault_injection.from_agent import KillOnce, inject_node_fault
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import checked_version, encode, read
from hyperpod_ext.runtime.ipc.resumed import Sent
from hyperpod_ext.runtime.memory_server.protocol import requests as r
from hyperpod_ext.runtime.process_group.address_book import NodeAddressBook

_DYING_LOOKS, _DYING_LOOK_S = 20, 0.001
"""Maximum number of checks whether all threads of a dying process have ended, and seconds between two checks."""
_LAST_EVENT_S = 0.02
"""Number of seconds between the event about an injected node loss and the injection."""

Tell = Callable[[c.FromAgent], None]
Log = Callable[..., None]
Spawn = Callable[[Coroutine[Any, Any, None]], None]


@dataclass(slots=True, eq=False)
class Start:
    """A planned start of a worker on this node."""

    rank: int
    world_size: int | None
    """World size of the next rank assignment, if the worker is started for the next assignment; otherwise None."""
    joining: bool
    """True: `rank` comes from the next rank assignment. False: `rank` comes from the current assignment."""
    forking: int | None = None
    """Local rank of the process, while it is being forked; otherwise None."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker(MonitoredWorker):
    """The agent's data on one worker process of this node."""

    rank: int
    local_rank: int
    former_rank: int = -1
    """Rank number that this worker had before ranks last got new numbers."""
    liveness_lock: LivenessLock | None = None
    joining: bool = False
    """Whether the worker was started for the next rank assignment, and waits until the assignment applies."""
    is_watched: bool = False
    """Whether a thread of the agent waits for the end of the worker's main thread."""
    joined: int = 0
    """Newest generation that the worker has joined or asked to join."""
    waiting: c.Join | None = None
    """The worker's request to join a generation that has not begun yet; None if the worker is not waiting."""
    writer: asyncio.StreamWriter | None = None
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    finished: bool = False
    """Whether the worker's training function has returned. After its return, the worker saves no more snapshots, unless
    another generation begins."""
    reported: bool = False
    """Whether the end of the process has been reported."""
    is_replaced: bool = False
    """Whether a new process will replace this worker, which then joins no more generations, and is killed when the new
    process can start."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set when the process has ended completely, so that its devices are free."""
    sent: Sent = field(default_factory=Sent)
    """Newest orders to the worker, kept to send them again if the connection breaks."""
    received: int = 0
    """Number of reports that were received from the worker, over all its connections."""
    saved: int = 0
    """Newest step that the script itself has saved."""

    def send(self, frame: bytes) -> None:
        """Send an order to the worker. If the worker's connection is broken, the order is sent when the worker connects
        again."""
        self.sent.add(frame)
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(frame)


class Workers:
    """The worker processes of this node.

    Args:
        tell: function that sends a report to the coordinator.
        event: function that sends an event to the coordinator.
        spawn: function that runs a coroutine as a background task.
    """

    def __init__(
        self, settings: NodeSettings, memory: AsyncMemoryClient, *, tell: Tell, event: Log, spawn: Spawn
    ) -> None:
        self._settings, self._config, self._memory = settings, settings.config, memory
        self._gathering = Gathering(tell, lambda: [rank for rank, its in self._workers.items() if not its.joining])
        self._tell, self._event, self._spawn = self._gathering.tell, event, spawn
        chaos = self._config.chaos if settings.chaos and not settings.rejoin else None
        self._kill = KillOnce(chaos.faults if chaos is not None else ())
        self.monitor = HangMonitor(settings, lambda: self._workers, tell, event)
        self._workers: dict[int, _Worker] = {}
        self._known = asyncio.Condition()
        self.generation = 1
        self.world_size = self._config.world_size
        self.moved_in = 0
        """Generation in which workers of this node last received new rank numbers."""
        self._leaving: dict[int, asyncio.Event] = {}
        """Events that are set when a device is free, by the local rank of a worker that is still ending."""
        self._starts: dict[int, Start] = {}
        """Newest planned start of a worker for each rank of this node."""
        self.finishing = False
        self.exited: dict[int, int] = {}
        """Exit codes of the workers that have ended after their training, by rank."""
        self.master_port = 0
        self._disk_problems: set[str] = set()
        """Problems of the node's disks that this agent has already printed."""
        self._addresses = NodeAddressBook(
            self._config.workers_per_node,
            lambda generation, ranks: self._tell(c.LookUp(generation=generation, ranks=ranks)),
        )

    @property
    def ranks(self) -> list[int]:
        return sorted(self._workers)

    @property
    def newest_step(self) -> int:
        """Newest training step that any worker of this node has begun; 0 if there are no workers."""
        return max((worker.step for worker in self._workers.values()), default=0)

    @property
    def save_no_more(self) -> bool:
        """Whether a worker of this node has finished training, so that no more snapshots are saved."""
        return self.finishing or any(worker.finished for worker in self._workers.values())

    def all_live(self) -> bool:
        """Return whether all worker processes are alive, and no worker process is ending."""
        return all_live([worker.pid for worker in self._workers.values()])

    def summary(self) -> dict[str, Any]:
        """Return the fields of `AgentHandshake` that describe the workers of this node."""
        by_script = self._config.restarts_script
        steps = [worker.saved + 1 if by_script else worker.step for worker in self._workers.values()]
        return {
            "generation": self.generation,
            "moved_in": self.moved_in,
            "workers": {
                rank: c.RunningWorker(pid=worker.pid, step=worker.step, joining=worker.joining)
                for rank, worker in self._workers.items()
            },
            "committed": max((step - 1 for step in steps if step), default=0),
            "exited": dict(self.exited),
        }

    def send(self, order: c.ToWorker) -> None:
        """Send an order to all workers. Workers that were started for the next rank assignment receive only aborts."""
        match order:
            case c.BeginGeneration():
                self._addresses.begin(order.generation, order.follows, order.addresses)
            case c.Addresses(generation=generation, addresses=addresses):
                self._addresses.add(generation, addresses)
        frame = wire.encode(encode(order))
        for rank, worker in self._workers.items():
            if worker.writer is None or (worker.joining and not isinstance(order, c.AbortGeneration)):
                continue
            if isinstance(order, c.BeginGeneration):
                # the order contains the rank's current number, because the worker may have joined before it got this
                # number
                worker.waiting, worker.joined = None, order.generation
                frame = wire.encode(encode(order.model_copy(update={"rank": rank})))
            worker.send(frame)

    def leave(self, order: c.AbortGeneration) -> None:
        """Abort the current generation on all workers. A worker that does not leave the generation within
        `restart.leave_timeout_s` is killed."""
        self._gathering.drop()
        self.generation = order.generation
        if order.drop_joining:
            # the coordinator has cancelled the assignment of ranks for the next generation
            self.end_joining()
        if order.moved_in > self.moved_in:
            self._renumber(order.moved, order.moved_in)
        self.send(order)
        for worker in self._workers.values():
            if worker.waiting is not None:
                # the generation for which the worker waits never began, so the worker joins the next generation
                self._spawn(self._join(worker, worker.waiting))
        # keep only process ids, because `_Worker` objects would keep file descriptors open until the timeout
        pids = {worker.pid for worker in self._workers.values()}
        wait_s = self._config.restart.leave_timeout_s
        asyncio.get_running_loop().call_later(wait_s, self._end_stuck, pids, self.generation)

    def _renumber(self, moved: Mapping[int, int], generation: int) -> None:
        """Give ranks their new numbers. A worker without a new number is killed if another worker gets its former
        number. If a worker has no new number and its former number stays free, the coordinator sends a separate order
        for the worker."""
        here = self._workers.items()
        pending = {rank for rank in self._starts if rank not in self._workers or self._workers[rank].is_replaced}
        pending = {rank for rank in pending if rank in moved or self._starts[rank].joining}
        joining = {its.rank for its in self._numbered() if its.joining}
        used = {moved[rank] for rank in (self._workers.keys() | pending) - joining if rank in moved}
        out = {rank for rank, worker in here if rank not in moved and rank in used and not worker.joining}
        self.keep_only((self._workers.keys() - out) | pending)
        kept = self._workers.keys() | pending
        numbers = {rank: rank if rank in joining else moved.get(rank, rank) for rank in kept}
        # workers that are still to be started also get new numbers
        self._starts = {numbers[rank]: start for rank, start in self._starts.items() if rank in kept}
        self._workers = {numbers[rank]: worker for rank, worker in self._workers.items()}
        for worker in self._workers.values():
            worker.former_rank = worker.rank
        for its in self._numbered():
            its.rank, its.joining = numbers[its.rank], False
        self.moved_in = generation

    def _numbered(self) -> list[_Worker | Start]:
        """Return all objects with a rank number: workers, and planned starts of workers."""
        return [*self._workers.values(), *self._starts.values()]

    def learn(self, faults: Iterable[tuple[int, int]]) -> None:
        """Record which injected faults have already happened, because a fault is injected only once per job. `faults`:
        rank and step of each fault that has happened."""
        for rank, step in faults:
            self._kill.forget(rank, step)

    def end_joining(self) -> None:
        """Kill the workers that were started for the next rank assignment, without reporting their ends."""
        self.keep_only([rank for rank, worker in self._workers.items() if not worker.joining])

    def kill_all(self) -> None:
        """Kill all workers, without reporting their ends."""
        self.keep_only(())

    def end_trainers(self, why: str) -> None:
        """Kill the workers that have not left their generation, and report their ends with kind `stuck` and cause
        `why`."""
        for rank, worker in self._workers.items():
            if worker.joined and worker.waiting is None:
                self._event("stuck", rank=rank, step=worker.step)
                self.monitor.end(rank, why, "stuck")

    async def all_wait(self) -> None:
        """Wait until every worker of this node waits for the begin of a generation."""
        async with self._known:
            await self._known.wait_for(lambda: all(worker.waiting is not None for worker in self._workers.values()))

    def keep_only(self, ranks: Collection[int]) -> None:
        """Kill the workers of all ranks except `ranks`, without reporting their ends."""
        for rank in self._starts.keys() - set(ranks):
            del self._starts[rank]
        for rank in self._workers.keys() - set(ranks):
            worker = self._workers.pop(rank)
            send_signal(worker.pid)

    def expect(self, rank: int, world_size: int | None = None) -> Start:
        """Plan the start of a worker for `rank`. Returns the argument for the method `start`.

        Args:
            world_size: world size of the next rank assignment, if the worker is started for the next assignment;
                otherwise None.
        """
        start = self._starts[rank] = Start(rank, world_size, joining=world_size is not None)
        if (old := self._workers.get(rank)) is not None:
            old.is_replaced = True
            self._gathering.take_back(rank)
        return start

    async def start(self, start: Start, fork_server: ForkServer) -> None:
        """Kill the rank's former worker, and fork its replacement. Does nothing if `start` was cancelled in the
        meantime."""
        if (leaving := self._leaving.get(self._local_rank(start))) is not None:
            await leaving.wait()
        if not self._is_wanted(start):
            return
        rank, local_rank = start.rank, self._local_rank(start)
        if (old := self._workers.pop(rank, None)) is not None:
            send_signal(old.pid)
            if self._config.restarts_script:
                # wait for the old process, which may still write files that its replacement reads
                await old.gone.wait()
        log = self._settings.run_dir / "logs" / f"rank{rank}.log"
        each, world_size = self._config.workers_per_node, start.world_size or self.world_size
        page = self.monitor.new_page()
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(each),
            "GROUP_RANK": str(rank // each),
            "GROUP_WORLD_SIZE": str(world_size // each),
            "MASTER_ADDR": self._settings.host,
            "MASTER_PORT": str(self.master_port),
            ENV_HEARTBEAT: page.path,
        }
        lock = LivenessLock(Path(page.path))
        lock.prepare()
        start.forking = local_rank
        try:
            (pid, was_warm), script = await asyncio.gather(
                fork_server.fork(argv=self._settings.argv, env=env, cwd=Path.cwd(), log=log),
                asyncio.to_thread(_checksum, Path(self._settings.argv[0])),
            )
        finally:
            start.forking = None
        if not self._is_wanted(start):
            fork_server.on_exit(pid, lambda status: None)
            send_signal(pid)  # kill the new process, because the start was cancelled during the fork
            return
        rank = start.rank  # the rank may have got a new number during the fork
        worker = _Worker(
            pid=pid,
            log=log,
            heartbeat=page,
            rank=rank,
            local_rank=local_rank,
            liveness_lock=lock,
            joining=start.joining,
        )
        async with self._known:
            self._workers[rank] = worker
            self._known.notify_all()
        self._event("worker_started", rank=rank, pid=pid, warm=was_warm, script=script)
        fork_server.on_exit(pid, lambda status: self._exited(worker, status, fork_server))

    def _is_wanted(self, start: Start) -> bool:
        return self._starts.get(start.rank) is start

    def _local_rank(self, start: Start) -> int:
        """Return the local rank for a new worker. If the rank has a process now, the new worker gets this process's
        local rank. If the rank has no process, the new worker gets the rank modulo the number of workers per node, or
        the first free local rank if that number is in use. The local rank determines the device, and does not change
        when ranks get new numbers."""
        if (old := self._workers.get(start.rank)) is not None:
            return old.local_rank
        each = self._config.workers_per_node
        used = {worker.local_rank for worker in self._workers.values()}
        used |= {other.forking for other in self._starts.values() if other is not start and other.forking is not None}
        wanted = start.rank % each
        return next((local for local in (wanted, *range(each)) if local not in used), wanted)

    def _exited(self, worker: _Worker, status: int, fork_server: ForkServer) -> None:
        worker.gone.set()
        self._spawn(fork_server.adopt_orphans())
        shutil.rmtree(temporary_folder(self._settings.socket_dir, worker.pid), ignore_errors=True)
        # closes the lock's file descriptor now, because tasks may keep the `_Worker` object longer
        worker.liveness_lock = None
        if not worker.reported:
            worker.reported = True
            self._spawn(self._ended(worker, status, time.monotonic()))

    def _wait_for_death(self, worker: _Worker, lock: LivenessLock, loop: asyncio.AbstractEventLoop) -> None:
        if lock.wait():
            # the event loop may have ended, because the node is shutting down
            with contextlib.suppress(RuntimeError):
                seen = time.monotonic()
                loop.call_soon_threadsafe(lambda: self._spawn(self._dying(worker, seen)))

    async def _dying(self, worker: _Worker, seen: float) -> None:
        """Report the end of a killed worker as soon as its main thread has ended, even before its memory is free."""
        for _ in range(_DYING_LOOKS):
            if worker.reported or (status := dying_of(worker.pid)) is not None:
                break
            await asyncio.sleep(_DYING_LOOK_S)
        if worker.reported or status is None or self._workers.get(worker.rank) is not worker or worker.writer is None:
            return
        worker.reported = True
        await self._ended(worker, status, seen)
        await self._memory.ask(r.Ended(pid=worker.pid))

    def _end_stuck(self, pids: Collection[int], generation: int) -> None:
        """Kill each worker in `pids` that has not left its generation to join `generation`."""
        limit_s = self._config.restart.leave_timeout_s
        cause = f"did not leave generation {generation - 1} within {limit_s:g} s of a fault on another rank"
        for rank, worker in self._workers.items():
            if worker.pid in pids and worker.joined < generation:
                self._event("stuck", rank=rank, step=worker.step)
                self.monitor.end(rank, cause, "stuck")

    async def _ended(self, worker: _Worker, status: int, seen: float) -> None:
        # kill the worker's child processes, such as data loaders, because they may hold its sockets open
        kill_group(worker.pid)
        if worker.writer is not None:
            # end the connection after the sent data are read, because a child process in another session may hold it
            # open
            with contextlib.suppress(OSError):  # the connection may have ended already
                worker.writer.get_extra_info("socket").shutdown(socket.SHUT_RD)
            # pass on all reports of the worker before reporting its end
            await worker.hung_up.wait()
        rank = worker.rank
        if self._workers.get(rank) is not worker:
            return  # report no death, because this agent killed the worker to remove or replace it
        del self._workers[rank]
        if worker.is_replaced and self._config.restarts_script:
            return  # report no death, because a replacement for this worker is about to start
        code = os.waitstatus_to_exitcode(status)
        never_joined = worker.writer is None
        written = last_line(worker.log) if code > 0 else ""
        if self.finishing or (code == 0 and never_joined):
            self.exited[rank] = code
            self._tell(c.Exited(rank=rank, code=code, last_line=written))
            return
        exit_cause = self.monitor.exit_cause(worker, status, written)
        if not worker.gone.is_set() and (exit_cause["kind"] == "out-of-memory" or has_gpu()):
            self._leaving[worker.local_rank] = worker.gone
        hint = f"The full output of the rank is in {worker.log}." if code >= 0 else ""
        # a restart cannot help if the script fails before it begins to train
        unable = never_joined and code > 0
        exit_cause |= {"joined": worker.joined, "t": seen}
        self._tell(c.Died(rank=rank, exit_code=code, final=unable, hint=hint, **exit_cause))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive the reports of one worker, and pass them on, until the worker's connection ends."""
        pid = wire.check_same_user(writer.get_extra_info("socket"))
        if (first := await wire.read(reader)) is None:
            return  # the worker died before its first message; its pidfd reports the end
        try:
            handshake = read(c.WorkerHandshake, checked_version(first, "this agent", "its worker"), "handshake")
        except wire.WireError as error:
            sys.stderr.write(f"process {pid} was refused: {error}\n")
            raise
        worker = await self._worker_of(pid)
        if handshake.again:
            self._resume(worker, writer, handshake.received)
        worker.writer = writer
        if worker.liveness_lock is not None and not worker.is_watched:
            worker.is_watched = True
            given = (worker, worker.liveness_lock, asyncio.get_running_loop())
            threading.Thread(target=self._wait_for_death, args=given, name="hpx-liveness-lock", daemon=True).start()
        try:
            while (message := await wire.read(reader)) is not None and worker.writer is writer:
                worker.received += 1
                await self._read(worker, message)
        finally:
            if worker.writer is writer:
                worker.hung_up.set()

    def _resume(self, worker: _Worker, writer: asyncio.StreamWriter, received: int) -> None:
        """Continue a worker's broken connection over `writer`. The worker has received the first `received` orders, and
        gets all later orders.

        Raises:
            WireError: an order that the worker has not received is no longer kept.
        """
        missing = worker.sent.after(received)
        if worker.writer is not None:
            worker.writer.close()
        worker.hung_up.clear()
        writer.write(wire.encode(encode(c.WorkerResumed(received=worker.received))))
        for frame in missing:
            writer.write(frame)

    async def _worker_of(self, pid: int) -> _Worker:
        """Return the worker with process id `pid`. Waits until the fork server has reported this process id."""

        def known() -> _Worker | None:
            return next((worker for worker in self._workers.values() if worker.pid == pid), None)

        async with self._known:
            await self._known.wait_for(lambda: known() is not None)
            worker = known()
        assert worker is not None
        return worker

    async def _read(self, worker: _Worker, message: wire.Message) -> None:
        """Decode a worker's report, and pass the report on to the coordinator. An invalid report is logged and
        skipped."""
        try:
            report = c.WORKER_REPORTS.decode(message)
        except wire.WireError as error:
            sys.stderr.write(f"a message of rank {worker.rank} was refused: {error}\n")
        else:
            await self._pass_on(worker, report)

    async def _pass_on(self, worker: _Worker, report: c.FromWorker) -> None:
        own: dict[str, Any] = {"rank": worker.rank}
        match report:
            case c.Join():
                await self._join(worker, report)
                return
            case c.Event():
                self.monitor.heard(worker, report)
                self._stepped(worker, report)
                # the report is from before the worker got its current number, so it is about the former number
                if report.generation < self.moved_in:
                    own["rank"] = worker.former_rank
            case c.Restored(error="") if not worker.joining:
                self._gathering.restored(worker.rank, report)
                return
            case c.LookUp(ranks=ranks):
                if known := self._addresses.look_up(ranks):
                    generation = self._addresses.generation
                    worker.send(wire.encode(encode(c.Addresses(generation=generation, addresses=known))))
                return
            case c.Finished():
                worker.finished = True
            case c.Failed(cause=cause):
                kind = "out-of-memory" if is_out_of_memory(cause) else "exception"
                own |= {"t": time.monotonic(), "kind": kind, "phase": worker.phase}
                if report.generation < self.generation:
                    # the report must name the current generation, because `rank` is a rank number of the current
                    # generation
                    own |= {"joined": report.generation, "generation": self.generation}
        self._tell(report.model_copy(update=own))

    def _stepped(self, worker: _Worker, report: c.Event) -> None:
        """Record the step that a worker has begun, and inject the faults that are due at the step."""
        made, rank = report.fields.get("step"), worker.rank
        if self._config.restarts_script and report.event in ("begun", "script_saved") and isinstance(made, int):
            worker.saved = made
        if report.event not in ("begun", "step") or not isinstance(made, int):
            return
        worker.step = made + 1
        if self._kill.due(rank, worker.step):
            send_signal(worker.pid)  # the signal has no effect if the worker is dead
            self._event("killed", rank=rank, step=worker.step)
        if self._kill.due_node(self._settings.node, worker.step):
            self._lose_node(worker.step)

    def _lose_node(self, step: int) -> None:
        """Inject the loss of this node, shortly after the event about the loss was sent."""
        for rank in self._workers:
            self._event("killed", rank=rank, step=step, t=time.monotonic() + _LAST_EVENT_S)
        fault = NodeFault(kind="sigkill", node=self._settings.node)
        asyncio.get_running_loop().call_later(_LAST_EVENT_S, inject_node_fault, fault, lambda: None)

    async def _join(self, worker: _Worker, report: c.Join) -> None:
        worker.joined = self.generation
        if worker.is_replaced:
            return
        worker.waiting, worker.finished = report, False
        async with self._known:
            self._known.notify_all()
        held = await self._memory.ask(r.Held(owner=worker.rank, pid=worker.pid))
        rank = worker.rank
        if self._workers.get(rank) is worker and worker.waiting is report:
            own = report.model_copy(update={"rank": rank, "pid": worker.pid})
            if worker.joining:
                self._tell(own)
            else:
                disk = c.DiskState.model_validate(held.disk)
                new = [problem for problem in disk.problems if problem not in self._disk_problems]
                sys.stderr.writelines(f"warning: {problem}\n" for problem in new)
                self._disk_problems.update(new)
                self._gathering.join(rank, own, *held_in(held), disk)


def _checksum(script: Path) -> str:
    try:
        return f"{zlib.crc32(script.read_bytes()):08x}"
    except OSError:  # raise nothing: the worker itself fails with the same error, and reports this error
        return ""
