"""The workers of one node: started, listened to, passed on to the coordinator, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
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
from hyperpod_ext.processes import kill_group
from hyperpod_ext.runtime.agent.children import ForkServer
from hyperpod_ext.runtime.agent.gathering import Gathering
from hyperpod_ext.runtime.agent.hang_monitor import HangMonitor
from hyperpod_ext.runtime.agent.memory_client import AsyncMemoryClient
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

_STARTS = itertools.count(1)
_DYING_LOOKS, _DYING_LOOK_S = 20, 0.001
"""How often, and how far apart, it is looked whether all threads of a dying process have come to their end."""
_LAST_EVENT_S = 0.02
"""How long the word of a rehearsed end of this node has to get away."""

Tell = Callable[[c.FromAgent], None]
Log = Callable[..., None]
Spawn = Callable[[Coroutine[Any, Any, None]], None]


@dataclass(slots=True)
class _Worker:
    """A worker process on this node."""

    rank: int
    pid: int
    log: Path
    liveness_lock: LivenessLock | None
    local_rank: int
    joining: bool = False
    """Whether it waits for the next rank assignment."""
    is_watched: bool = False
    """Whether a thread waits for the end of its main thread."""
    step: int = 0
    """Step it is making, as far as it has told."""
    joined: int = 0
    """Newest generation that it has asked to join, or is in."""
    waiting: c.Join | None = None
    """What it asked with, until that generation begins."""
    writer: asyncio.StreamWriter | None = None
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    finished: bool = False
    """Whether its training is done: it saves no more, unless another generation begins."""
    reported: bool = False
    """Whether its end is known."""
    is_replaced: bool = False
    """Whether another takes its place: it is ended once that can be started, and until then joins nothing."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has ended, and all that it had is free."""
    sent: Sent = field(default_factory=Sent)
    """Orders, for a connection that follows one that broke."""
    received: int = 0
    """Reports that it has sent, over all of its connections."""

    def send(self, frame: bytes) -> None:
        """Send an order. Where the connection is broken, the next one brings it."""
        self.sent.add(frame)
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(frame)


class Workers:
    """Worker processes of this node, by rank.

    Args:
        tell, event: messages and events for the coordinator.
        spawn: runs work beside everything else.
    """

    def __init__(
        self, settings: NodeSettings, memory: AsyncMemoryClient, *, tell: Tell, event: Log, spawn: Spawn
    ) -> None:
        self._settings, self._config, self._memory = settings, settings.config, memory
        self._gathering = Gathering(tell, lambda: [rank for rank, its in self._workers.items() if not its.joining])
        self._tell, self._event, self._spawn = self._gathering.tell, event, spawn
        rehearsing = settings.chaos and not settings.rejoin and self._config.chaos is not None
        self._kill = KillOnce(self._config.chaos.faults if rehearsing and self._config.chaos else ())
        self.monitor = HangMonitor(settings.config, settings.run_dir, settings.socket_dir, settings.node, tell, event)
        self._workers: dict[int, _Worker] = {}
        self._known = asyncio.Condition()
        self.generation = 1
        self.world_size = settings.config.world_size
        self.moved_in = 0
        """Generation in which ranks last got other numbers, as far as those here go by them."""
        self._leaving: dict[int, asyncio.Event] = {}
        """By local rank, where the next worker needs what the former still has: set when that is free."""
        self._starting: dict[int, int] = {}
        """Local rank of each start whose process is being forked."""
        self._starts: dict[int, int] = {}
        """Of each rank that is wanted here, the newest start."""
        self._starts_of_next: set[int] = set()
        """Starts of the next rank assignment: their ranks are numbers of that one."""
        self.finishing = False
        self.exited: dict[int, int] = {}
        """Exit codes of those that ended when their training was done."""
        self.master_port = 0
        self._disk_problems: set[str] = set()
        """Those that were reported."""
        self._addresses = NodeAddressBook(settings.config.workers_per_node, self._ask_addresses)

    @property
    def ranks(self) -> list[int]:
        return sorted(self._workers)

    @property
    def newest_step(self) -> int:
        """Step that the first of them is making."""
        return max((worker.step for worker in self._workers.values()), default=0)

    @property
    def save_no_more(self) -> bool:
        """Whether one of them has made its last step."""
        return self.finishing or any(worker.finished for worker in self._workers.values())

    def all_live(self) -> bool:
        """Whether none of them ends at this moment."""
        return all_live([worker.pid for worker in self._workers.values()])

    def summary(self) -> dict[str, Any]:
        """What a coordinator that does not know these workers must be told of them: fields of `AgentHandshake`."""
        return {
            "generation": self.generation,
            "moved_in": self.moved_in,
            "workers": {
                rank: c.RunningWorker(pid=worker.pid, step=worker.step, joining=worker.joining)
                for rank, worker in self._workers.items()
            },
            "committed": max((worker.step - 1 for worker in self._workers.values() if worker.step), default=0),
            "exited": dict(self.exited),
        }

    def send(self, order: c.ToWorker) -> None:
        """To all workers here; those that wait for the next rank assignment hear of aborts alone."""
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
                worker.waiting, worker.joined = None, order.generation  # it may have asked before we knew which forms
                frame = wire.encode(encode(order.model_copy(update={"rank": rank})))
            worker.send(frame)

    def leave(self, order: c.AbortGeneration) -> None:
        """A generation is over: tell everybody, and end those that do not come out of it in time."""
        self._gathering.drop()
        self.generation = order.generation
        if order.drop_joining:  # another coordinator knows nothing of the rank assignment that they wait for
            self.end_joining()
        if order.moved_in > self.moved_in:
            self._renumber(order.moved, order.moved_in)
        self.send(order)
        for rank, worker in self._workers.items():
            if worker.waiting is not None:  # it waits for a generation that never began; let it wait for this one
                self._spawn(self._join(rank, worker, worker.waiting))
            wait_s = self._config.restart.leave_timeout_s
            asyncio.get_running_loop().call_later(wait_s, self._end_stuck, worker, self.generation)

    def _renumber(self, moved: Mapping[int, int], generation: int) -> None:
        """Ranks have got other numbers. Workers without one are ended by an order of their own, unless another worker
        here has theirs from now on."""
        here = self._workers.items()
        pending = {rank for rank in self._starts if rank not in self._workers or self._workers[rank].is_replaced}
        pending = {rank for rank in pending if rank in moved or self._starts[rank] in self._starts_of_next}
        joining = {rank for rank, worker in here if worker.joining}
        joining |= {rank for rank, start in self._starts.items() if start in self._starts_of_next}
        self._starts_of_next.clear()
        used = {moved[rank] for rank in (self._workers.keys() | pending) - joining if rank in moved}
        out = {rank for rank, worker in here if rank not in moved and rank in used and not worker.joining}
        self.keep_only((self._workers.keys() - out) | pending)
        kept = self._workers.keys() | pending
        numbers = {rank: rank if rank in joining else moved.get(rank, rank) for rank in kept}
        self.monitor.renumber({rank: now for rank, now in numbers.items() if rank not in joining})
        # a process that is about to be started is of its rank, whatever number that has by then
        self._starts = {numbers[rank]: start for rank, start in self._starts.items() if rank in kept}
        self._workers = {numbers[rank]: worker for rank, worker in self._workers.items()}
        for rank, worker in self._workers.items():
            worker.rank, worker.joining = rank, False
        self.moved_in = generation

    def learn(self, faults: Iterable[tuple[int, int]]) -> None:
        """Rank and step of what has happened in the job: of rehearsed faults, each does once."""
        for rank, step in faults:
            self._kill.forget(rank, step)

    def end_joining(self) -> None:
        """SIGKILL to those that wait for the next rank assignment; nobody is told of these deaths."""
        self.keep_only([rank for rank, worker in self._workers.items() if not worker.joining])

    def kill_all(self) -> None:
        """SIGKILL to each; nobody is told of these deaths."""
        self.keep_only(())

    def end_trainers(self, why: str) -> None:
        """End those that are in a generation still."""
        for rank, worker in self._workers.items():
            if worker.joined and worker.waiting is None:
                self._event("stuck", rank=rank, step=worker.step)
                self.monitor.end(rank, why, "stuck")

    async def all_wait(self) -> None:
        """Returns when each worker here waits for a generation."""
        async with self._known:
            await self._known.wait_for(lambda: all(worker.waiting is not None for worker in self._workers.values()))

    def keep_only(self, ranks: Collection[int]) -> None:
        """End those that are none of these: of a world that has come to nothing, or that this node has left."""
        for rank in self._starts.keys() - set(ranks):
            del self._starts[rank]
        for rank in self._workers.keys() - set(ranks):
            worker = self._workers.pop(rank)
            self.monitor.forget(rank)
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)

    def expect(self, rank: int, *, joining: bool = False) -> int:
        """A worker is about to be started for `rank`, of the next rank assignment if it is `joining`: what `start` is
        given."""
        self._starts[rank] = next(_STARTS)
        if joining:
            self._starts_of_next.add(self._starts[rank])
        if (old := self._workers.get(rank)) is not None:
            old.is_replaced = True
            self._gathering.take_back(rank)
        return self._starts[rank]

    async def start(self, rank: int, this: int, fork_server: ForkServer, world_size: int | None = None) -> None:
        """Fork a worker for `rank`; one that is there already is ended.

        None stays where it was expected once more meanwhile, or is not wanted any longer. Where ranks get other numbers
        meanwhile, it is of the rank that it was expected for.
        """
        if (leaving := self._leaving.get(self._local_rank(rank))) is not None:
            await leaving.wait()
        if (now := self._rank_of(this)) is None:
            return
        rank = now
        local_rank = self._local_rank(rank)
        if (old := self._workers.pop(rank, None)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(old.pid, signal.SIGKILL)
        log = self._settings.run_dir / "logs" / f"rank{rank}.log"
        each = self._config.workers_per_node
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(world_size or self.world_size),
            "LOCAL_WORLD_SIZE": str(each),
            "GROUP_RANK": str(rank // each),
            "GROUP_WORLD_SIZE": str((world_size or self.world_size) // each),
            "MASTER_ADDR": self._settings.host,
            "MASTER_PORT": str(self.master_port),
            **self.monitor.environ(rank),
        }
        lock = LivenessLock(Path(env[ENV_HEARTBEAT]))
        lock.prepare()
        self._starting[this] = local_rank
        try:
            (pid, was_warm), script = await asyncio.gather(
                fork_server.fork(argv=self._settings.argv, env=env, cwd=Path.cwd(), log=log),
                asyncio.to_thread(_checksum, Path(self._settings.argv[0])),
            )
        finally:
            self._starting.pop(this, None)
        if (now := self._rank_of(this)) is None:
            fork_server.on_exit(pid, lambda status: None)
            with contextlib.suppress(ProcessLookupError):  # a warm spare that has ended
                os.kill(pid, signal.SIGKILL)
            return
        rank = now
        worker = _Worker(rank, pid, log, lock, local_rank, joining=this in self._starts_of_next)
        async with self._known:
            self._workers[rank] = worker
            self._known.notify_all()
        self.monitor.started(rank, pid, log)
        self._event("worker_started", rank=rank, pid=pid, warm=was_warm, script=script)
        fork_server.on_exit(pid, lambda status: self._exited(worker, status, fork_server))

    def _rank_of(self, start: int) -> int | None:
        """The rank that this start is for; None: for none any longer."""
        return next((rank for rank, newest in self._starts.items() if newest == start), None)

    def _local_rank(self, rank: int) -> int:
        """That of the process which `rank` has here, or else its place among the ranks of a node, or the first that is
        free where another process has that: numbers change, devices of processes do not."""
        if (old := self._workers.get(rank)) is not None:
            return old.local_rank
        each = self._config.workers_per_node
        used = {worker.local_rank for worker in self._workers.values()}
        others = set(self._starts.values()) - {self._starts.get(rank)}
        used |= {local for start, local in self._starting.items() if start in others}
        wanted = rank % each
        return next((local for local in (wanted, *range(each)) if local not in used), wanted)

    def _exited(self, worker: _Worker, status: int, fork_server: ForkServer) -> None:
        """A worker's process has ended."""
        worker.gone.set()
        self._spawn(fork_server.adopt_orphans())
        shutil.rmtree(temporary_folder(self._settings.socket_dir, worker.pid), ignore_errors=True)
        worker.liveness_lock = None  # others remember the worker for a while; its page has a descriptor
        if not worker.reported:
            worker.reported = True
            self._spawn(self._ended(worker, status, time.monotonic()))

    def _wait_for_death(self, worker: _Worker, lock: LivenessLock, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own."""
        if lock.wait():
            with contextlib.suppress(RuntimeError):  # the node has ended as well
                seen = time.monotonic()
                loop.call_soon_threadsafe(lambda: self._spawn(self._dying(worker, seen)))

    async def _dying(self, worker: _Worker, seen: float) -> None:
        """A worker's main thread has ended. If all of it was killed, that is news before its memory is free."""
        for _ in range(_DYING_LOOKS):
            if worker.reported or (status := dying_of(worker.pid)) is not None:
                break
            await asyncio.sleep(_DYING_LOOK_S)
        if worker.reported or status is None or self._workers.get(worker.rank) is not worker or worker.writer is None:
            return
        worker.reported = True
        await self._ended(worker, status, seen)
        await self._memory.ask(r.Ended(pid=worker.pid))

    def _end_stuck(self, worker: _Worker, generation: int) -> None:
        """Kill a worker that was told to leave its generation and has not: its state lives on elsewhere."""
        rank = worker.rank
        if worker.joined < generation and self._workers.get(rank) is worker:
            self._event("stuck", rank=rank, step=worker.step)
            limit_s = self._config.restart.leave_timeout_s
            cause = f"did not leave generation {generation - 1} within {limit_s:g} s of a fault elsewhere"
            self.monitor.end(rank, cause, "stuck")

    async def _ended(self, worker: _Worker, status: int, seen: float) -> None:
        kill_group(worker.pid)  # its children, data loaders: they hold its sockets open
        if worker.writer is not None:
            # what it has said before is read, and then the line ends here: a child in a session of its own may hold it
            with contextlib.suppress(OSError):  # it has ended already
                worker.writer.get_extra_info("socket").shutdown(socket.SHUT_RD)
            await worker.hung_up.wait()  # what it said before it died comes before the news of its death
        rank = worker.rank
        if self._workers.get(rank) is not worker:
            return  # ended by us, for another one
        del self._workers[rank]
        code = os.waitstatus_to_exitcode(status)
        never_joined = worker.writer is None
        written = last_line(worker.log) if code > 0 else ""
        if self.finishing or (code == 0 and never_joined):
            self.exited[rank] = code
            self._tell(c.Exited(rank=rank, code=code, last_line=written))
            return
        exit_cause = self.monitor.exit_cause(rank, status, worker.step, written)
        if not worker.gone.is_set() and (exit_cause["kind"] == "out-of-memory" or has_gpu()):
            self._leaving[worker.local_rank] = worker.gone
        hint = f"The whole story is in {worker.log}." if code >= 0 else ""
        unable = never_joined and code > 0  # a script that ends before its training does so each time
        exit_cause |= {"joined": worker.joined, "t": seen}
        self._tell(c.Died(rank=rank, exit_code=code, final=unable, hint=hint, **exit_cause))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One worker's line, for as long as it lives."""
        pid = wire.check_same_user(writer.get_extra_info("socket"))
        if (first := await wire.read(reader)) is None:
            return  # it died before its first word; its pidfd tells
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
        """Go on over `writer` with a worker whose connection broke, and which has received so many orders.

        Raises:
            WireError: too many are missing.
        """
        missing = worker.sent.after(received)
        if worker.writer is not None:
            worker.writer.close()
        worker.hung_up.clear()
        writer.write(wire.encode(encode(c.WorkerResumed(received=worker.received))))
        for frame in missing:
            writer.write(frame)

    async def _worker_of(self, pid: int) -> _Worker:
        """The worker that connected; it may do so before the fork server has told its process id. Its rank may have got
        another number since it was started."""

        def known() -> _Worker | None:
            return next((worker for worker in self._workers.values() if worker.pid == pid), None)

        async with self._known:
            await self._known.wait_for(lambda: known() is not None)
            worker = known()
        assert worker is not None
        return worker

    async def _read(self, worker: _Worker, message: wire.Message) -> None:
        """What is damaged is refused, and the next message is read."""
        try:
            report = c.WORKER_REPORTS.decode(message)
        except wire.WireError as error:
            sys.stderr.write(f"a message of rank {worker.rank} was refused: {error}\n")
            return
        await self._pass_on(worker.rank, worker, report)

    async def _pass_on(self, rank: int, worker: _Worker, report: c.FromWorker) -> None:
        own: dict[str, Any] = {"rank": rank}
        match report:
            case c.Join():
                await self._join(rank, worker, report)
                return
            case c.Event():
                self.monitor.heard(rank, report)
                self._stepped(worker, report)
            case c.Restored(error="") if not worker.joining:
                self._gathering.restored(rank, report)
                return
            case c.LookUp(ranks=ranks):
                self._look_up(worker, ranks)
                return
            case c.Finished():
                worker.finished = True
            case c.Failed(cause=cause):
                kind = "out-of-memory" if is_out_of_memory(cause) else "exception"
                own |= {"t": time.monotonic(), "kind": kind, "phase": self.monitor.phase(rank)}
                if report.generation < self.generation:  # its rank's number is that of now
                    own |= {"joined": report.generation, "generation": self.generation}
        self._tell(report.model_copy(update=own))

    def _look_up(self, worker: _Worker, ranks: Collection[int]) -> None:
        book = self._addresses
        if (known := book.look_up(ranks)) and worker.writer is not None:
            worker.send(wire.encode(encode(c.Addresses(generation=book.generation, addresses=known))))

    def _ask_addresses(self, generation: int, ranks: tuple[int, ...]) -> None:
        self._tell(c.LookUp(generation=generation, ranks=ranks))

    def _stepped(self, worker: _Worker, report: c.Event) -> None:
        """A worker told of a step that it has made, or begins to make; faults may be rehearsed there."""
        made, rank = report.fields.get("step"), worker.rank
        if report.event not in ("begun", "step") or not isinstance(made, int):
            return
        worker.step = made + 1
        if self._kill.due(rank, worker.step):
            with contextlib.suppress(ProcessLookupError):  # a real fault was quicker
                os.kill(worker.pid, signal.SIGKILL)
            self._event("killed", rank=rank, step=worker.step)
        if self._kill.due_node(self._settings.node, worker.step):
            self._lose_node(worker.step)

    def _lose_node(self, step: int) -> None:
        """A rehearsal: everything on this node dies, as soon as the event log has been told."""
        for rank in self._workers:
            self._event("killed", rank=rank, step=step, t=time.monotonic() + _LAST_EVENT_S)
        fault = NodeFault(kind="sigkill", node=self._settings.node)
        asyncio.get_running_loop().call_later(_LAST_EVENT_S, inject_node_fault, fault, lambda: None)

    async def _join(self, rank: int, worker: _Worker, report: c.Join) -> None:
        worker.joined = self.generation
        if worker.is_replaced:
            return
        worker.waiting, worker.finished = report, False
        async with self._known:
            self._known.notify_all()
        held = await self._memory.ask(r.Held(owner=rank, pid=worker.pid))
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
                self._gathering.join(rank, own, held_snapshots(held.snapshots), held_pieces(held.pieces), disk)


def held_snapshots(snapshots: Iterable[Mapping[str, Any]]) -> tuple[c.HeldSnapshot, ...]:
    """What a memory server says that it has, as the coordinator is told."""
    return tuple(c.HeldSnapshot.model_validate(one) for one in snapshots)


def held_pieces(pieces: Iterable[Mapping[str, Any]]) -> tuple[c.HeldPiece, ...]:
    """The parity that it says it keeps."""
    return tuple(c.HeldPiece.model_validate(one) for one in pieces)


def _checksum(script: Path) -> str:
    try:
        return f"{zlib.crc32(script.read_bytes()):08x}"
    except OSError:  # whoever runs it will say why
        return ""
