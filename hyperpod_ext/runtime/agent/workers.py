"""The workers of one node: started, listened to, passed on to the coordinator, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperpod_ext.config.fault_injection import NodeFault
from hyperpod_ext.runtime.agent.children import Zygote, on_exit
from hyperpod_ext.runtime.agent.hang_monitor import Watch
from hyperpod_ext.runtime.agent.memory_client import MemoryLine
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.coordinator.queries import all_live
from hyperpod_ext.runtime.detection.death_watch import Lifeline, dying_of, has_gpu
from hyperpod_ext.runtime.detection.failure_causes import is_out_of_memory
from hyperpod_ext.runtime.detection.heartbeat import ENV_PULSE
from hyperpod_ext.runtime.fault_injection.from_agent import KillOnce, strike_node
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.memory_server.protocol import requests as r

_OF_THIS_WORLD = frozenset({"begin", "restore", "go", "finish", "ask_stop", "stop_at", "go_on"})
"""What is no business of a worker that waits for the next world."""
_STARTS = itertools.count(1)
_DYING_LOOKS, _DYING_LOOK_S = 20, 0.001
"""How often, and how far apart, it is looked whether all threads of a dying process have come to their end."""
_LAST_EVENT_S = 0.02
"""How long the word of a rehearsed end of this node has to get away."""

Tell = Callable[..., None]
Spawn = Callable[[Coroutine[Any, Any, None]], None]


@dataclass(slots=True)
class _Worker:
    """A worker process on this node."""

    rank: int
    pid: int
    log: Path
    lifeline: Lifeline | None
    coming: bool = False
    """Whether it is a rank of the next world, and waits for that."""
    step: int = 0
    """Step it is making, as far as it has told."""
    joined: int = 0
    """Newest generation it has asked to join."""
    waiting: wire.Message | None = None
    """What it asked with, until that generation begins."""
    writer: asyncio.StreamWriter | None = None
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    finished: bool = False
    """Whether its training is done: it saves no more, unless another generation begins."""
    told: bool = False
    """Whether its end is known."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has ended, and all that it had is free."""


class Workers:
    """Worker processes of this node, by rank.

    Args:
        tell, event: messages and events for the coordinator.
        spawn: runs work beside everything else.
    """

    def __init__(self, settings: NodeSettings, memory: MemoryLine, *, tell: Tell, event: Tell, spawn: Spawn) -> None:
        self._settings, self._config, self._memory = settings, settings.config, memory
        self._tell, self._event, self._spawn = tell, event, spawn
        rehearsing = settings.chaos and not settings.rejoin and self._config.chaos is not None
        self._kill = KillOnce(self._config.chaos.faults if rehearsing and self._config.chaos else ())
        self.watch = Watch(settings.config, settings.run_dir, settings.socket_dir, settings.node, tell, event)
        self._workers: dict[int, _Worker] = {}
        self._known = asyncio.Condition()
        self.generation = 1
        self.world_size = settings.config.world_size
        self.moved_in = 0
        """Generation in which ranks last got other numbers, as far as those here go by them."""
        self._leaving: dict[int, asyncio.Event] = {}
        """Of ranks whose next worker needs what the former still has: set when that is free."""
        self._starts: dict[int, int] = {}
        """Of each rank that is wanted here, the newest start."""
        self.finishing = False
        self.exited: dict[int, int] = {}
        """Exit codes of those that ended when their training was done."""
        self.master_port = 0

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

    def brief(self) -> dict[str, Any]:
        """What a coordinator that does not know these workers must be told of them."""
        return {
            "generation": self.generation,
            "moved_in": self.moved_in,
            "workers": {
                str(rank): {"pid": worker.pid, "step": worker.step, "coming": worker.coming}
                for rank, worker in self._workers.items()
            },
            "committed": max((worker.step - 1 for worker in self._workers.values()), default=0),
            "exited": {str(rank): code for rank, code in self.exited.items()},
        }

    def send(self, message: wire.Message) -> None:
        """To all workers here."""
        frame, begins = wire.encode(message), message["type"] == "begin"
        for rank, worker in self._workers.items():
            if worker.writer is None or (worker.coming and message["type"] in _OF_THIS_WORLD):
                continue
            if begins:
                worker.waiting = None
                frame = wire.encode({**message, "rank": rank, "world_size": len(message["addresses"])})
            worker.writer.write(frame)

    def leave(self, message: wire.Message) -> None:
        """A generation is over: tell everybody, and end those that do not come out of it in time."""
        self.generation = int(message["generation"])
        if message.get("drop_coming"):  # another coordinator knows nothing of the world that they wait for
            self.keep_only([rank for rank, worker in self._workers.items() if not worker.coming])
        if int(message.get("moved_in", 0)) > self.moved_in:
            self._renumber({int(rank): int(now) for rank, now in message["moved"].items()}, int(message["moved_in"]))
        self.send(message)
        for rank, worker in self._workers.items():
            if worker.waiting is not None:  # it waits for a generation that never began; let it wait for this one
                self._spawn(self._join(rank, worker, worker.waiting))
            wait_s = self._config.restart.leave_timeout_s
            asyncio.get_running_loop().call_later(wait_s, self._end_stuck, worker, self.generation)

    def _renumber(self, moved: Mapping[int, int], generation: int) -> None:
        """The job has another world. Workers without a number in it are ended by an order of their own."""
        numbers = {rank: rank if worker.coming else moved.get(rank, rank) for rank, worker in self._workers.items()}
        self.watch.renumber({rank: now for rank, now in numbers.items() if not self._workers[rank].coming})
        self._workers = {numbers[rank]: worker for rank, worker in self._workers.items()}
        for rank, worker in self._workers.items():
            worker.rank, worker.coming = rank, False
        self.moved_in = generation

    def learn(self, faults: Sequence[Mapping[str, Any]]) -> None:
        """What has happened in the job: of rehearsed faults, each does once."""
        for fault in faults:
            self._kill.forget(int(fault["rank"]), int(fault["step"]))

    def kill_all(self) -> None:
        """SIGKILL to each; nobody is told of these deaths."""
        self.keep_only(())

    def keep_only(self, ranks: Collection[int]) -> None:
        """End those that are none of these: of a world that has come to nothing, or that this node has left."""
        for rank in self._starts.keys() - set(ranks):
            del self._starts[rank]
        for rank in self._workers.keys() - set(ranks):
            worker = self._workers.pop(rank)
            self.watch.forget(rank)
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)

    def expect(self, rank: int) -> int:
        """A worker is about to be started for `rank`: what `start` is given."""
        self._starts[rank] = next(_STARTS)
        return self._starts[rank]

    async def start(
        self, rank: int, this: int, zygote: Zygote, world_size: int | None = None, *, coming: bool = False
    ) -> None:
        """Fork a worker for `rank`; one that is there already is ended. `coming`: of the next world.

        None stays where it was expected once more meanwhile, or is not wanted any longer.
        """
        if (leaving := self._leaving.get(rank)) is not None:
            await leaving.wait()
        if self._starts.get(rank) != this:
            return
        if (old := self._workers.pop(rank, None)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(old.pid, signal.SIGKILL)
        log = self._settings.run_dir / "logs" / f"rank{rank}.log"
        each = self._config.workers_per_node
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % each),
            "WORLD_SIZE": str(world_size or self.world_size),
            "LOCAL_WORLD_SIZE": str(each),
            "GROUP_RANK": str(rank // each),
            "GROUP_WORLD_SIZE": str((world_size or self.world_size) // each),
            "MASTER_ADDR": self._settings.host,
            "MASTER_PORT": str(self.master_port),
            **self.watch.environ(rank),
        }
        lifeline = Lifeline(Path(env[ENV_PULSE]))
        lifeline.prepare()
        pid = await zygote.fork(argv=self._settings.argv, env=env, cwd=Path.cwd(), log=log)
        if self._starts.get(rank) != this:
            on_exit(pid, lambda status: None)
            os.kill(pid, signal.SIGKILL)
            return
        worker = _Worker(rank, pid, log, lifeline, coming)
        async with self._known:
            self._workers[rank] = worker
            self._known.notify_all()
        self.watch.started(rank, pid, log)
        self._event("worker_started", rank=rank, pid=pid)
        on_exit(pid, lambda status: self._exited(worker, status))

    def _exited(self, worker: _Worker, status: int) -> None:
        """A worker's process has ended."""
        worker.gone.set()
        worker.lifeline = None  # others remember the worker for a while; its page has a descriptor
        if not worker.told:
            worker.told = True
            self._spawn(self._ended(worker, status, time.monotonic()))

    def _wait_for_death(self, worker: _Worker, lifeline: Lifeline, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own."""
        if lifeline.wait():
            with contextlib.suppress(RuntimeError):  # the node has ended as well
                seen = time.monotonic()
                loop.call_soon_threadsafe(lambda: self._spawn(self._dying(worker, seen)))

    async def _dying(self, worker: _Worker, seen: float) -> None:
        """A worker's main thread has ended. If all of it was killed, that is news before its memory is free."""
        for _ in range(_DYING_LOOKS):
            if worker.told or (status := dying_of(worker.pid)) is not None:
                break
            await asyncio.sleep(_DYING_LOOK_S)
        if worker.told or status is None or self._workers.get(worker.rank) is not worker or worker.writer is None:
            return
        worker.told = True
        # what it has said before is read, then the line ends, here and at the memory server
        with contextlib.suppress(OSError):  # it has ended already
            worker.writer.get_extra_info("socket").shutdown(socket.SHUT_RD)
        await self._ended(worker, status, seen)
        await self._memory.ask(r.Ended(pid=worker.pid))

    def _end_stuck(self, worker: _Worker, generation: int) -> None:
        """Kill a worker that was told to leave its generation and has not: its state lives on elsewhere."""
        rank = worker.rank
        if worker.joined < generation and self._workers.get(rank) is worker:
            self._event("stuck", rank=rank, step=worker.step)
            limit_s = self._config.restart.leave_timeout_s
            cause = f"did not leave generation {generation - 1} within {limit_s:g} s of a fault elsewhere"
            self.watch.end(rank, cause, "stuck")

    async def _ended(self, worker: _Worker, status: int, seen: float) -> None:
        with contextlib.suppress(ProcessLookupError):  # its children, data loaders: they hold its sockets open
            os.killpg(worker.pid, signal.SIGKILL)
        if worker.writer is not None:
            await worker.hung_up.wait()  # what it said before it died comes before the news of its death
        rank = worker.rank
        if self._workers.get(rank) is not worker:
            return  # ended by us, for another one
        del self._workers[rank]
        code = os.waitstatus_to_exitcode(status)
        never_joined = worker.writer is None
        if self.finishing or (code == 0 and never_joined):
            self.exited[rank] = code
            self._tell("exited", rank=rank, code=code)
            return
        fate = self.watch.fate(rank, status, worker.step, _last_words(worker.log) if code > 0 else "")
        if not worker.gone.is_set() and (fate["kind"] == "out-of-memory" or has_gpu()):
            self._leaving[rank] = worker.gone
        hint = f"The whole story is in {worker.log}." if code >= 0 else ""
        # a script that exits by itself would do so again; one that was killed may not
        self._tell("died", rank=rank, exit_code=code, final=code >= 0, hint=hint, t=seen, **fate)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One worker's line, for as long as it lives."""
        pid = wire.check_same_user(writer.get_extra_info("socket"))
        if (hello := await wire.read(reader)) is None:
            return  # it died before its first word; its pidfd tells
        rank = int(hello["rank"])
        worker = await self._worker_of(rank, pid)
        worker.writer = writer
        if worker.lifeline is not None:
            given = (worker, worker.lifeline, asyncio.get_running_loop())
            threading.Thread(target=self._wait_for_death, args=given, name="hpx-lifeline", daemon=True).start()
        try:
            while (message := await wire.read(reader)) is not None:
                await self._pass_on(worker.rank, worker, message)
        finally:
            worker.hung_up.set()

    async def _worker_of(self, rank: int, pid: int) -> _Worker:
        """The worker that connected; it may do so before the zygote has told its process id."""
        async with self._known:
            await self._known.wait_for(lambda: rank in self._workers and self._workers[rank].pid == pid)
            return self._workers[rank]

    async def _pass_on(self, rank: int, worker: _Worker, message: wire.Message) -> None:
        if message["type"] == "join":
            await self._join(rank, worker, message)
            return
        self.watch.heard(rank, message)
        if message["type"] == "event" and message["event"] in ("begun", "step"):
            worker.step = int(message["step"]) + 1
            if self._kill.due(rank, worker.step):
                with contextlib.suppress(ProcessLookupError):  # a real fault was quicker
                    os.kill(worker.pid, signal.SIGKILL)
                self._event("killed", rank=rank, step=worker.step)
            if self._kill.due_node(self._settings.node, worker.step):
                self._lose_node(worker.step)
        elif message["type"] == "finished":
            worker.finished = True
        elif message["type"] == "failed":
            kind = "out-of-memory" if is_out_of_memory(str(message["cause"])) else "exception"
            message |= {"t": time.monotonic(), "kind": kind, "phase": self.watch.phase(rank)}
        # a worker that has joined no generation yet speaks for the one its agent is in
        message["generation"] = message.get("generation") or self.generation
        self._tell(message.pop("type"), **{**message, "rank": rank})

    def _lose_node(self, step: int) -> None:
        """A rehearsal: everything on this node dies, as soon as the event log has been told."""
        for rank in self._workers:
            self._event("killed", rank=rank, step=step, t=time.monotonic() + _LAST_EVENT_S)
        fault = NodeFault(kind="sigkill", node=self._settings.node)
        asyncio.get_running_loop().call_later(_LAST_EVENT_S, strike_node, fault, lambda: None)

    async def _join(self, rank: int, worker: _Worker, message: wire.Message) -> None:
        worker.joined, worker.waiting, worker.finished = self.generation, message, False
        held = await self._memory.ask(r.Held(owner=rank, pid=worker.pid))
        rank = worker.rank
        if self._workers.get(rank) is worker and worker.waiting is message:
            self._tell("join", **{**message, "rank": rank, "pid": worker.pid, "held": held.snapshots})


def _last_words(log: Path) -> str:
    """Last line that a worker wrote, which for an exception is its type and message."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
