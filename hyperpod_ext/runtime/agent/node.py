"""One node: its memory server, its zygote, its workers, and the line to the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperpod_ext.config.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.errors import HyperpodExtError, JobFailedError
from hyperpod_ext.processes import become_subreaper, describe_exit, kill_descendants
from hyperpod_ext.runtime import wire
from hyperpod_ext.runtime.agent.chaos import KillOnce
from hyperpod_ext.runtime.agent.children import Zygote, on_exit, start_memory_server
from hyperpod_ext.runtime.agent.coordinator import Coordinator
from hyperpod_ext.runtime.agent.preflight import check_tiers
from hyperpod_ext.runtime.environment import (
    ENV_AGENT_SOCKET,
    ENV_FAILURE_DOMAIN,
    ENV_MEMORY_SOCKET,
    ENV_SECRET_FILE,
)
from hyperpod_ext.runtime.listener import Listener
from hyperpod_ext.runtime.rendezvous.kv import KeyValueServer

_LINE_LOST = "the coordinator is gone"
_FAILED = JobFailedError.__name__
_DRAIN_S = 3600.0
"""How long the last checkpoints of a job that succeeded may take to arrive."""
_MEMORY_START_S = 30.0
_WATCH_S = 5.0
"""How often it is looked how copies to other tiers go."""
_LAST_WORD_S = 5.0
"""How long a node that cannot go on waits for the coordinator to end the job."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What one agent was started with."""

    config: RuntimeConfig
    node: int
    host: str
    port: int
    argv: list[str]
    """Script and its arguments."""
    run_dir: Path
    socket_dir: Path
    secret_file: Path
    secret: bytes
    chaos: bool = True
    join_timeout_s: float = 600.0


@dataclass(slots=True)
class _Worker:
    """A worker process on this node."""

    pid: int
    log: Path
    step: int = 0
    """Step it is making, as far as it has told."""
    joined: int = 0
    """Newest generation it has asked to join."""
    writer: asyncio.StreamWriter | None = None
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)


class Node:
    """Runs one node of a job until the job ends."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._config = settings.config
        self._agent_socket = settings.socket_dir / f"node{settings.node}.agent"
        self._memory_socket = settings.socket_dir / f"node{settings.node}.memory"
        self._workers: dict[int, _Worker] = {}
        self._generation = 1
        self._copying: dict[str, dict[str, Any]] = {}
        """Of each tier: how copying to it went when it was told last."""
        self._beginning: dict[str, Any] = {}
        """Of the decision that ranks restore: the job's run, and whether it is a durable checkpoint."""
        self._finishing = False
        self._kill = KillOnce(self._config.chaos.faults if settings.chaos and self._config.chaos else ())
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._coordinator: Coordinator | None = None
        self._memory_ended = False
        self._kv = KeyValueServer(settings.secret, self._break)
        self._listener = Listener(self._serve_worker, self._break)
        self._known = asyncio.Condition()
        self._master_port = 0
        self._line: asyncio.StreamWriter | None = None

    async def run(self) -> str:
        """Returns the job's final state: succeeded, failed or cancelled.

        Raises:
            JobFailedError: this node could not go on; the job's report says the same.
        """
        become_subreaper()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._cancel)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._cancel)
        try:
            return await self._run()
        finally:
            # nothing of this node outlives its agent; its memory goes with the memory server
            kill_descendants(os.getpid())
            self._agent_socket.unlink(missing_ok=True)
            self._memory_socket.unlink(missing_ok=True)

    async def _run(self) -> str:
        settings = self._settings
        if settings.node == 0:
            self._coordinator = Coordinator(self._config, settings.run_dir, settings.secret, _free_port(settings.host))
            await self._coordinator.start(settings.host, settings.port)
        environ = self._worker_environ()
        zygote = await Zygote.start(self._config.restart.preload, environ)
        on_exit(zygote.pid, lambda status: self._break(f"the process that forks workers {describe_exit(status)}"))
        self._zygote = zygote
        memory_pid = start_memory_server(self._memory_socket, settings.node, environ)
        on_exit(memory_pid, self._memory_server_ended)
        await self._listener.listen_unix(self._agent_socket)
        reader, self._line = await self._connect()
        address = str(self._line.get_extra_info("sockname")[0])
        peer = [address, (await self._ask_memory({"op": "listen", "host": address}))["port"]]
        domain = os.environ.get(ENV_FAILURE_DOMAIN, "")
        store = [address, await self._kv.start(address)]
        self._tell("hello", node=settings.node, pid=os.getpid(), address=store, peer=peer, domain=domain)
        try:
            return await self._obey(reader)
        finally:
            kill_descendants(os.getpid())
            await self._listener.close()
            await self._kv.close()
            if self._coordinator is not None:
                await self._coordinator.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Reach the coordinator, which may start later than this node."""
        host, port = self._settings.host, self._settings.port
        deadline = time.monotonic() + self._settings.join_timeout_s
        while True:
            try:
                reader, writer = await asyncio.open_connection(host, port)
                break
            except OSError as error:
                if self._broken.done():
                    raise JobFailedError(f"node {self._settings.node}: {self._broken.result()}") from error
                if time.monotonic() > deadline:
                    raise JobFailedError(f"no coordinator at {host}:{port}: {error}") from error
                await asyncio.sleep(0.1)
        await wire.join_peer(reader, writer, self._settings.secret)
        return reader, writer

    # --- what the coordinator says --------------------------------------------------------------

    async def _obey(self, reader: asyncio.StreamReader) -> str:
        while (message := await self._next_order(reader)) is not None:
            if message["type"] == "end":
                await self._bring_home(str(message["state"]), reader)
                return str(message["state"])
            await self._follow(message)
        raise JobFailedError(f"node {self._settings.node}: {_LINE_LOST}")

    async def _next_order(self, reader: asyncio.StreamReader) -> wire.Message | None:
        """Next message of the coordinator, None when it is gone; raises when this node cannot go on."""
        reading = asyncio.ensure_future(wire.read(reader))
        waited: set[asyncio.Future[Any]] = {reading, self._broken}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if self._broken.done():
            reading.cancel()
            raise JobFailedError(f"node {self._settings.node}: {self._broken.result()}")
        try:
            return reading.result()
        except ConnectionError:
            return None

    async def _bring_home(self, state: str, reader: asyncio.StreamReader) -> None:
        """The job is over: see what is in memory to the durable tiers while there is a memory server."""
        policy = self._config.checkpoint
        if not policy.durable():
            return
        for worker in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)  # from here on nobody writes to the slots
        if state == "succeeded":
            await self._held_at_last()  # the last step may not be sealed yet, and so not be due
            await self._ask_memory({"op": "wait_idle", "timeout_s": _DRAIN_S})
            await self._tell_copying()
            return
        until = time.monotonic() + policy.grace_s
        with contextlib.suppress(OSError, TimeoutError, JobFailedError):  # then older checkpoints have to do
            async with asyncio.timeout(policy.grace_s):
                self._tell("leaving", node=self._settings.node, held=await self._held_at_last())
                newest = await self._newest_of_all(reader)
            if newest:
                left = {"timeout_s": max(0.0, until - time.monotonic())}
                answer = await self._ask_memory({"op": "drain_now", "save_id": newest, **left})
                self._event("drained", save_id=newest, in_time=answer["idle"])

    async def _held_at_last(self) -> list[Any]:
        """Snapshots in this node's memory, once all that its workers had asked for is done."""
        snapshots: list[Any] = []
        first = self._settings.node * self._config.workers_per_node
        for rank in range(first, first + self._config.workers_per_node):
            if self._memory_ended:
                return []
            answer = await self._ask_memory({"op": "held", "owner": rank, "pid": os.getpid()})
            snapshots = answer["snapshots"]
        return snapshots

    async def _newest_of_all(self, reader: asyncio.StreamReader) -> str:
        """Save id of the newest snapshot that every node holds; empty: there is none."""
        while (message := await wire.read(reader)) is not None:
            if message["type"] == "bring_home":
                return str(message["save_id"])
        return ""

    async def _follow(self, message: wire.Message) -> None:
        match message["type"]:
            case "welcome":
                self._master_port = int(message["master_port"])
                peers = {"peers": message["peers"], "domains": message["domains"]}
                await self._ask_memory({"op": "peers", **peers})
                self._spawn(self._start_workers())
            case "replace":
                self._spawn(self._start_worker(int(message["rank"])))
            case "abort":
                self._generation = int(message["generation"])
                self._to_workers(message)  # first of all: survivors are waiting in their collectives
                for rank, worker in self._workers.items():
                    wait_s = self._config.restart.leave_timeout_s
                    asyncio.get_running_loop().call_later(wait_s, self._end_stuck, rank, worker, self._generation)
                await self._kv.enter(self._generation)
            case "begin" | "restore":
                self._generation = int(message["generation"])  # the first one follows those of earlier runs
                decision = message["decision"]
                stored = any(s["kind"] in ("file", "s3") for each in decision["sources"].values() for s in each)
                self._beginning = {"run": message["run"], "stored": stored}
                # not at the abort: what ranks saved before they left, or died, is still on its way then
                await self._ask_memory({"op": "fence", "generation": self._generation})
                self._to_workers(message)
            case "go":
                # until now, when everybody has this step, a newer one might have been needed yet
                fence = {"generation": self._generation, "step": message["step"], **self._beginning}
                await self._ask_memory({"op": "fence", **fence})
                self._to_workers(message)
            case "drain_at":
                await self._ask_memory({"op": "drain_at", "kind": message["kind"], "step": message["step"]})
            case "durable":
                # a store may take its time, and an abort may not wait for it
                self._spawn(self._look_at_durable(message["besides"]))
            case "finish":
                self._finishing = True
                self._to_workers(message)
            case _:
                self._to_workers(message)

    def _to_workers(self, message: wire.Message) -> None:
        frame = wire.encode(message)
        for worker in self._workers.values():
            if worker.writer is not None:
                worker.writer.write(frame)

    # --- workers --------------------------------------------------------------------------------

    async def _start_workers(self) -> None:
        checking = asyncio.to_thread(check_tiers, self._config) if self._settings.node == 0 else asyncio.sleep(0)
        seconds, _ = await asyncio.gather(self._zygote.ready(), checking)
        self._event("imported", seconds=seconds)
        if self._config.checkpoint.durable() or self._config.checkpoint.peer():
            self._spawn(self._watch_copying())
        first = self._settings.node * self._config.workers_per_node
        for rank in range(first, first + self._config.workers_per_node):
            await self._start_worker(rank)

    async def _start_worker(self, rank: int) -> None:
        log = self._settings.run_dir / "logs" / f"rank{rank}.log"
        local_rank = rank - self._settings.node * self._config.workers_per_node
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self._config.world_size),
            "LOCAL_WORLD_SIZE": str(self._config.workers_per_node),
            "GROUP_RANK": str(self._settings.node),
            "GROUP_WORLD_SIZE": str(self._config.nodes),
            "MASTER_ADDR": self._settings.host,
            "MASTER_PORT": str(self._master_port),
        }
        pid = await self._zygote.fork(argv=self._settings.argv, env=env, cwd=Path.cwd(), log=log)
        worker = _Worker(pid, log)
        async with self._known:
            self._workers[rank] = worker
            self._known.notify_all()
        self._event("worker_started", rank=rank, pid=pid)
        on_exit(pid, lambda status: self._spawn(self._worker_ended(rank, worker, status)))

    def _end_stuck(self, rank: int, worker: _Worker, generation: int) -> None:
        """Kill a worker that was told to leave its generation and has not: its state lives on elsewhere."""
        if worker.joined < generation and self._workers.get(rank) is worker:
            self._event("stuck", rank=rank, step=worker.step)
            os.kill(worker.pid, signal.SIGKILL)

    async def _worker_ended(self, rank: int, worker: _Worker, status: int) -> None:
        seen = time.monotonic()
        with contextlib.suppress(ProcessLookupError):  # its children, data loaders: they hold its sockets open
            os.killpg(worker.pid, signal.SIGKILL)
        if worker.writer is not None:
            await worker.hung_up.wait()  # what it said before it died comes before the news of its death
        if self._workers.get(rank) is worker:
            del self._workers[rank]
        code = os.waitstatus_to_exitcode(status)
        never_joined = worker.writer is None
        if self._finishing or (code == 0 and never_joined):
            self._tell("exited", rank=rank, code=code)
            return
        cause = describe_exit(status)
        if code > 0 and (words := _last_words(worker.log)):
            cause = f"{words} ({cause})"
        hint = f"The whole story is in {worker.log}." if code >= 0 else ""
        # a script that exits by itself would do so again; one that was killed may not
        self._tell("died", rank=rank, exit_code=code, cause=cause, step=worker.step, final=code >= 0, hint=hint, t=seen)

    async def _serve_worker(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid = wire.check_same_user(writer.get_extra_info("socket"))
        if (hello := await wire.read(reader)) is None:
            return  # it died before its first word; its pidfd tells
        rank = int(hello["rank"])
        worker = await self._worker_of(rank, pid)
        worker.writer = writer
        try:
            while (message := await wire.read(reader)) is not None:
                await self._pass_on(rank, worker, message)
        finally:
            worker.hung_up.set()

    async def _worker_of(self, rank: int, pid: int) -> _Worker:
        """The worker that connected; it may do so before the zygote has told its process id."""
        async with self._known:
            await self._known.wait_for(lambda: rank in self._workers and self._workers[rank].pid == pid)
            return self._workers[rank]

    async def _pass_on(self, rank: int, worker: _Worker, message: wire.Message) -> None:
        if message["type"] == "join":
            worker.joined = self._generation
            snapshots = await self._ask_memory({"op": "held", "owner": rank, "pid": worker.pid})
            message |= {"pid": worker.pid, "held": snapshots["snapshots"]}
        elif message["type"] == "event" and message["event"] in ("begun", "step"):
            worker.step = int(message["step"]) + 1
            if self._kill.due(rank, worker.step):
                with contextlib.suppress(ProcessLookupError):  # a real fault was quicker
                    os.kill(worker.pid, signal.SIGKILL)
                self._event("killed", rank=rank, step=worker.step)
        elif message["type"] == "failed":
            message["t"] = time.monotonic()
        # a worker that has joined no generation yet speaks for the one its agent is in
        message["generation"] = message.get("generation") or self._generation
        self._tell(message.pop("type"), **{**message, "rank": rank})

    async def _watch_copying(self) -> None:
        """Tell how copies to other tiers go, for as long as there is a memory server to ask."""
        with contextlib.suppress(OSError, JobFailedError):
            while True:
                await asyncio.sleep(_WATCH_S)
                await self._tell_copying()

    async def _tell_copying(self) -> None:
        """What has changed since it was told last; a failure also to whoever reads the log of this node."""
        for status in (await self._ask_memory({"op": "status"}))["copying"]:
            fields = copying_event(status)
            before, self._copying[fields["tier"]] = self._copying.get(fields["tier"], {}), fields
            if fields == before or not any(fields[key] for key in fields.keys() - {"tier"}):
                continue
            self._event("copying", **fields)
            if fields["failed"] > before.get("failed", 0):
                sys.stderr.write(f"a copy to {fields['tier']} failed: {fields['last_error']}\n")
            if status.get("taken_over"):
                self._break(f"{fields['tier']}: {fields['last_error']}", code="StaleGenerationError")

    async def _look_at_durable(self, besides: list[list[str]]) -> None:
        found = await self._ask_memory({"op": "durable", "besides": besides})
        found["newest_generation"] = found.pop("generation")
        self._tell("durable", besides=besides, **found)

    async def _ask_memory(self, request: wire.Message) -> wire.Message:
        reader, writer = await self._open_memory()
        try:
            writer.write(wire.encode(request))
            answer = await wire.read(reader)
        finally:
            writer.close()
        if answer is None or "error" in answer:
            raise JobFailedError(f"the memory server did not answer: {answer}")
        return answer

    async def _open_memory(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        deadline = time.monotonic() + _MEMORY_START_S
        while True:
            try:
                return await asyncio.open_unix_connection(self._memory_socket, limit=wire.MAX_FRAME_BYTES)
            except (FileNotFoundError, ConnectionRefusedError):  # it is still starting
                if self._memory_ended:
                    raise JobFailedError("the memory server of this node is gone") from None
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.01)

    def _memory_server_ended(self, status: int) -> None:
        self._memory_ended = True
        self._break(f"the memory server ended: {describe_exit(status)}")

    # --- odds and ends --------------------------------------------------------------------------

    def _worker_environ(self) -> dict[str, str]:
        """Environment of the zygote, and so of every worker; libraries read some of it on import."""
        environ = {
            **os.environ,
            ENV_RUNTIME: self._config.model_dump_json(),
            ENV_SECRET_FILE: str(self._settings.secret_file),
            ENV_AGENT_SOCKET: str(self._agent_socket),
            ENV_MEMORY_SOCKET: str(self._memory_socket),
        }
        environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: many workers share the cores
        if self._settings.host in ("127.0.0.1", "localhost"):
            environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return environ

    def _event(self, event: str, **fields: Any) -> None:
        self._tell("event", event=event, t=time.monotonic(), node=self._settings.node, **fields)

    def _tell(self, kind: str, **fields: Any) -> None:
        assert self._line is not None, "not connected yet"
        self._line.write(wire.encode({"generation": self._generation, **fields, "type": kind}))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside everything else; its failure is the node's."""

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._break(str(error), code=type(error).__name__ if isinstance(error, HyperpodExtError) else _FAILED)

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(done)

    def _break(self, why: str, tell: str = "broken", code: str = _FAILED) -> None:
        """This node cannot go on: have the coordinator end the job, and end anyway if it does not."""

        def give_up() -> None:
            if not self._broken.done():
                self._broken.set_result(why)

        if self._line is None:
            give_up()
        else:
            self._tell(tell, node=self._settings.node, cause=why, code=code)
            asyncio.get_running_loop().call_later(_LAST_WORD_S, give_up)

    def _cancel(self) -> None:
        if self._coordinator is not None:
            self._coordinator.cancel()
        else:
            self._break("cancelled", tell="cancel")


def copying_event(status: dict[str, Any]) -> dict[str, Any]:
    """What the event log keeps of how copying to one tier goes."""
    step = status.get("replicated_step") if status["tier"] == "peer" else status["durable_step"]
    keys = ("tier", "failed", "skipped", "superseded", "last_error")
    return {**{key: status[key] for key in keys}, "newest_step": step}


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


def _last_words(log: Path) -> str:
    """Last line that a worker wrote, which for an exception is its type and message."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
