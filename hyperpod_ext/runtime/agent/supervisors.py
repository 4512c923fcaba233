"""Supervisors of a node's helper processes (fork server and memory server). When a helper process ends, its supervisor
starts a new helper process."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from hyperpod_ext.config.restart import RestartPolicy
from hyperpod_ext.files import make_private_folder
from hyperpod_ext.processes import describe_exit, process_state, send_signal
from hyperpod_ext.runtime.agent.children import (
    ForkServer,
    ForkServerEndedError,
    MemoryServer,
    on_exit,
)
from hyperpod_ext.runtime.agent.memory_client import AsyncMemoryClient
from hyperpod_ext.runtime.agent.reports import NodeReports
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.agent.workers import Workers
from hyperpod_ext.runtime.detection.failure_causes import OomKills, decode_exit
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.memory_server.protocol import requests as r

_DIES_S = 2.0
"""Number of seconds to wait until a killed process has ended. A process that waits for a disk ends only after the disk
has answered."""


class RestartLimit:
    """Limits how often a helper process is restarted, with `restart.max_on_node` and `restart.max_restarts`."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._steps: list[int] = []
        """Newest training step at each end of the helper process."""

    def count(self, step: int) -> str:
        """Count an end of the helper process at training step `step`. Returns why the helper process must not be
        restarted, as the end of a sentence; empty if it may be restarted."""
        policy, in_a_row = self._policy, 1
        for at, after in itertools.pairwise([step, *reversed(self._steps)]):
            if at - after >= policy.calm_steps:
                break
            in_a_row += 1
        self._steps.append(step)
        if in_a_row > policy.max_on_node:
            return f"; {in_a_row} times in a row, and the limit is {policy.max_on_node} (restart.max_on_node)"
        if (ends := len(self._steps)) > policy.max_restarts:
            return f"; {ends} times, and the limit is {policy.max_restarts} (restart.max_restarts)"
        return ""


class ForkSupervisor:
    """Keeps a fork server running. Workers are not children of the fork server, and continue to train if the fork
    server ends.

    Args:
        mend: function that creates the agent's socket file again if the file was removed; called before each fork.
    """

    def __init__(
        self, settings: NodeSettings, workers: Workers, reports: NodeReports, mend: Callable[[], Awaitable[None]]
    ) -> None:
        self._settings, self._workers, self._reports, self._mend = settings, workers, reports, mend
        self._limit = RestartLimit(settings.config.restart)
        self._ready: asyncio.Task[None] | None = None
        self._replaced = asyncio.Event()

    async def start(self, prepared: ForkServer | None = None) -> None:
        """Connect to the fork server `prepared`, or start a new fork server if `prepared` is None."""
        environ = self._settings.worker_environ()
        server = self._server = prepared or ForkServer(self._settings.config.restart.preload, environ)
        await server.connect({name: value for name, value in environ.items() if os.environ.get(name) != value})
        on_exit(server.pid, lambda status: self._reports.spawn(self._ended(server, status)))

    def fork_after(self, preparation: Coroutine[Any, Any, None]) -> None:
        """Start `preparation`, which calls `wait_imported`. Workers are forked only after `preparation` has ended."""
        self._ready = asyncio.create_task(preparation)

    async def wait_imported(self) -> None:
        """Wait until the fork server has imported its modules, and write an event about how long the imports took."""
        seconds = await self._server.ready()
        for note in self._server.notes:
            sys.stderr.write(f"hyperpod_ext: {note}\n")
        self._reports.event("imported", seconds=seconds, notes=self._server.notes)

    async def ready(self) -> None:
        """Wait until the fork server can fork workers."""
        assert self._ready is not None, "the first news of the job come before the first order"
        await asyncio.shield(self._ready)

    async def fork(self, start: Callable[[ForkServer], Awaitable[None]]) -> None:
        """Call `start` with the fork server, and again with the next fork server if the fork server ends during the
        call."""
        while True:
            replaced = self._replaced
            try:
                await self.ready()
                await self._mend()
                return await start(self._server)
            except ForkServerEndedError:
                await replaced.wait()

    def keep_warm(self) -> None:
        """Keep a warm spare (a process with a CUDA context) for each worker of this node."""
        self._reports.spawn(self._server.keep_warm(range(self._settings.config.workers_per_node)))

    async def _ended(self, server: ForkServer, status: int) -> None:
        cause, step = f"the process that forks workers {describe_exit(status)}", self._workers.newest_step
        if self._reports.over or not server.is_ready:
            self._reports.fail(cause, lost=True)
        elif why := self._limit.count(step):
            self._reports.fail(cause + why, lost=True)
        else:
            self._reports.event("fork_server_lost", cause=cause, step=step)
            await self.start()
            self.fork_after(self.wait_imported())
            self._replaced.set()
            self._replaced = asyncio.Event()


class MemorySupervisor:
    """Keeps a memory server running. If a memory server ends, its snapshots are lost, and workers save later snapshots
    to the next memory server."""

    def __init__(
        self, settings: NodeSettings, client: AsyncMemoryClient, workers: Workers, reports: NodeReports
    ) -> None:
        self._settings, self.client, self._workers, self._reports = settings, client, workers, reports
        client.on_silent = self._kill_silent
        self._limit = RestartLimit(settings.config.restart)
        self._oom_kills = OomKills()
        self._server: MemoryServer | None = None
        self.has_spare = False
        """Whether a spare node can replace this node."""
        self.peer: tuple[str, int] | None = None
        """Address at which memory servers of other nodes reach this node's memory server; None before it listens."""

    def start(self, prepared: MemoryServer | None = None) -> None:
        """Start the memory server. `prepared`: an already started process to use; None to start a new process."""
        self._start(self._settings.memory_socket, prepared)

    async def listen(self, host: str) -> None:
        """Order the memory server to listen on address `host` for connections from other nodes' memory servers."""
        self.peer = host, (await self.client.ask(r.Listen(host=host))).port

    def _start(self, path: Path, prepared: MemoryServer | None = None) -> None:
        make_private_folder(path.parent)
        path.unlink(missing_ok=True)  # a killed agent may have left this socket file
        settings, environ = self._settings, self._settings.worker_environ()
        server = self._server = prepared or MemoryServer(environ)
        server.begin(path, settings.memory_socket, settings.node, environ)
        on_exit(server.pid, lambda status: self._reports.spawn(self._ended(server, status)))

    def _kill_silent(self, why: str) -> None:
        """Kill a memory server that does not answer, for example because all its threads wait for a disk."""
        if (server := self._server) is None or server.silent:
            return
        server.silent = f"{why} ({process_state(server.pid)}) and was killed"
        send_signal(server.pid)
        self._reports.spawn(self._continue_without(server))

    async def _continue_without(self, server: MemoryServer) -> None:
        """Wait shortly for the end of the killed memory server, then continue as if it had ended, even if its process
        still exists."""
        await asyncio.sleep(_DIES_S)
        await self._ended(server, signal.SIGKILL)

    async def _ended(self, server: MemoryServer, status: int) -> None:
        if server.is_gone:
            return
        server.is_gone = True
        step, began = self._workers.newest_step, time.monotonic()
        how, words = server.silent or decode_exit(status, oom=self._oom_kills.since_last()).cause, ""
        if not server.silent:
            words = await server.last_log_line()
        cause = f"the memory server ended: {how}" + (f" ({words})" if words else "")
        if (why := self._why_no_other(step)) is not None:
            self.client.lost(cause)
            self._reports.fail(cause + why, lost=True)
            return
        self.client.lost()
        self._reports.event("memory_lost", cause=cause, step=step)
        self._start(self._settings.next_memory_socket)
        if answers := await self.client.succeed(self._settings.next_memory_socket):
            self._report_peer(answers)
            self._reports.event("memory_back", seconds=round(time.monotonic() - began, 4))

    def _why_no_other(self, step: int) -> str | None:
        """Return why no new memory server is started after the end of a memory server at training step `step`, as the
        end of a sentence; None to start a new memory server. The returned reason is empty if a spare node will replace
        this node, or if the job is over."""
        if self._reports.over or self.has_spare:
            return ""
        if self._workers.save_no_more and self._settings.config.checkpoint.durable():
            return ", and snapshots that were not yet uploaded to a durable tier are lost with it"
        return self._limit.count(step) or None

    def _report_peer(self, answers: Sequence[object]) -> None:
        """Report the port of the new memory server, so that other nodes send their copies to the new server."""
        ports = [answer.port for answer in answers if isinstance(answer, r.PeerPort)]
        if ports and self.peer is not None:
            self.peer = self.peer[0], ports[0]
            self._reports.tell(c.ServesPeers(peer=self.peer))
