"""Runs one node of a job: its helper processes, its workers, and its connection to the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.files import make_private_folder
from hyperpod_ext.processes import become_subreaper, kill_descendants
from hyperpod_ext.runtime.agent.children import Prepared
from hyperpod_ext.runtime.agent.coordinator_client import CoordinatorClient
from hyperpod_ext.runtime.agent.copies import CopyMonitor, LastStep
from hyperpod_ext.runtime.agent.election import Leadership
from hyperpod_ext.runtime.agent.memory_client import AsyncMemoryClient
from hyperpod_ext.runtime.agent.orders import Operator, Orders
from hyperpod_ext.runtime.agent.reports import NodeReports
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.agent.supervisors import ForkSupervisor, MemorySupervisor
from hyperpod_ext.runtime.agent.workers import Workers
from hyperpod_ext.runtime.detection import preemption as notices
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.environment import ENV_FAILURE_DOMAIN
from hyperpod_ext.runtime.ipc.interface import address_of
from hyperpod_ext.runtime.ipc.listener import Listener
from hyperpod_ext.runtime.log_rules.rules import LogRule, LogRules, of_spec
from hyperpod_ext.runtime.log_rules.watch import LogWatch

_MEMORY_SILENT_S = 15.0
"""Number of seconds within which the memory server must answer a request that does not wait for another process."""
_SOCKET_S = 1.0
"""Number of seconds between two checks that the agent's socket file still exists."""
_GRACE_S = 5.0
"""Number of seconds for which other nodes may still report their uploads after the grace period of the last upload."""


class Node:
    """Runs a node of a job until the job ends."""

    def __init__(
        self,
        settings: NodeSettings,
        watch: Callable[[c.ToAgent | c.FromAgent], None] | None = None,
        log_rules: Sequence[LogRule] = (),
        prepared: Prepared | None = None,
    ) -> None:
        config = settings.config
        self._settings, self._prepared = settings, prepared
        self._leadership = Leadership(settings)
        self._client = CoordinatorClient(
            settings, self._leadership.election, self._handshake, self._leadership.take_over
        )
        self._reports = reports = NodeReports(settings.node, self._client, lambda: self._workers.generation)
        # this limit is less than the hang limit, so that a silent memory server is not mistaken for hung ranks
        limit_s = min(_MEMORY_SILENT_S, config.restart.hang.floor_s / 2)
        memory = AsyncMemoryClient(settings.memory_socket, limit_s)
        self._workers = Workers(settings, memory, tell=reports.tell, event=reports.event, spawn=reports.spawn)
        self._memory = MemorySupervisor(settings, memory, self._workers, reports)
        self._socket = Listener(self._workers.serve, reports.fail)
        self._forks = ForkSupervisor(settings, self._workers, reports, self._mend_socket)
        copies = CopyMonitor(memory.ask, reports.event, reports.fail)
        self._last_step = LastStep(memory, copies, reports.tell, reports.event)
        self._orders = Orders(
            settings, self._client, self._workers, self._memory, self._forks, self._last_step, reports
        )
        self.operator = Operator(self._client, self._workers, self._memory, reports)
        self._log_watch = LogWatch(
            LogRules([*of_spec(config.log_rules), *log_rules]),
            settings.run_dir / "logs" / "rank0.log",
            lambda cause: self._workers.monitor.end(0, cause, "log-rule"),
            lambda: 0 in self._orders.ranks,
        )
        reports.listeners += [
            self._workers.monitor.see_report,
            self._log_watch.hear,
            *filter(None, [watch]),
            self.operator.repeat,
        ]
        self.asked_to_leave = False

    why_failed = "", ""
    """Why the job failed, and a hint, from the coordinator's last message; two empty strings if the job did not
    fail."""

    async def run(self) -> str:
        """Run the node until the job ends. Returns the job's final state ("succeeded", "failed" or "cancelled"), or
        "left" if the job continues without this node.

        Raises:
            JobFailedError: this node cannot continue. The job's report contains the same message.
        """
        become_subreaper()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.ask_to_end)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._cancel)
        try:
            return await self._run()
        finally:
            # end all processes of this node: no process, not even the memory server, may outlive the agent
            kill_descendants(os.getpid())
            for path in (self._settings.agent_socket, self._settings.memory_socket, self._settings.next_memory_socket):
                path.unlink(missing_ok=True)

    async def _run(self) -> str:
        settings, leadership = self._settings, self._leadership
        if interface := settings.config.interface:
            # check that the network interface exists before any process is started
            address_of(interface)
        if settings.node == 0 and not settings.rejoin:
            await leadership.begin()
        await self._forks.start(self._prepared and self._prepared.fork_server)
        self._memory.start(self._prepared and self._prepared.memory_server)
        await self._socket.listen_unix(settings.agent_socket)
        await self._client.connect(leadership.endpoint, self._reports.why_broken)
        address = address_of(interface) if interface else self._client.own_address
        if leadership.coordinator is None:
            await leadership.listen(*(settings.listen or (address, 0)))
        await self._memory.listen(address)
        self._client.send_handshake()
        self._start_watches()
        self._reports.event("network", interface=interface, address=address)
        try:
            return await self._obey()
        finally:
            kill_descendants(os.getpid())
            await self._socket.close()
            await self._client.close()
            await leadership.close()

    def _start_watches(self) -> None:
        self._reports.spawn(self._memory.client.watch())
        self._reports.spawn(self._watch_socket())
        if self._log_watch.has_rules:
            self._reports.spawn(self._log_watch.run())
        if (elastic := self._settings.config.elastic) is not None:
            watch = partial(notices.watch, elastic.notices, notices.metadata_of(elastic.notices), self._take_notice)
            self._reports.spawn(watch(lambda why: self._reports.event("no_notices", why=why)))

    # --- the coordinator's orders ---------------------------------------------------------------

    def _handshake(self, own_id: str, term: int, job_state: wire.Message | None) -> c.AgentHandshake:
        assert self._memory.peer is not None, "the memory server listens before the first handshake"
        return c.AgentHandshake(
            id=own_id,
            node=self._settings.node,
            pid=os.getpid(),
            peer=self._memory.peer,
            address=self._leadership.election.address,
            domain=os.environ.get(ENV_FAILURE_DOMAIN, ""),
            term=term,
            job_state=job_state,
            leaving=self.asked_to_leave,
            clock=time.monotonic(),
            **self._workers.summary(),
        )

    async def _obey(self) -> str:
        while (order := await self._next_order()) is not None:
            self._reports.pass_on(order)
            if isinstance(order, c.EndJob):
                self._reports.over, self.why_failed = True, (order.why, order.hint)
                if order.state != "succeeded":
                    await self._save_newest(order.grace_s)
                return order.state
            if isinstance(order, c.Released):
                self._reports.over = True
                if self._settings.config.checkpoint.durable():
                    await self._last_step.finish_due(self._settings.config.checkpoint.grace_s)
                return "left"
            await self._orders.follow(order)
        raise JobFailedError(f"node {self._settings.node}: the job's coordinator has ended before the job")

    async def _next_order(self) -> c.ToAgent | None:
        """Return the coordinator's next message; None if the job no longer has a coordinator.

        Raises:
            JobFailedError: this node cannot continue.
        """
        reading, broken = asyncio.ensure_future(self._client.next()), self._reports.broken
        waited: set[asyncio.Future[Any]] = {reading, broken}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if broken.done():
            reading.cancel()
            raise JobFailedError(f"node {self._settings.node}: {broken.result()}")
        return reading.result()

    async def _save_newest(self, grace_s: float) -> None:
        """Upload the newest snapshot within `grace_s` seconds, because the job has failed or was cancelled."""
        if not self._settings.config.checkpoint.durable():
            return
        reading = asyncio.ensure_future(self._read_to_the_end())
        # ignore errors, because the job ends in any case, and its older checkpoints remain
        with contextlib.suppress(OSError, TimeoutError, JobFailedError):
            async with asyncio.timeout(grace_s + _GRACE_S):
                await self._orders.save_last(grace_s)
                # keep the coordinator running until other nodes have reported their uploads
                if (coordinator := self._leadership.coordinator) is not None:
                    await coordinator.all_uploaded.wait()
        reading.cancel()

    async def _read_to_the_end(self) -> None:
        """Read the coordinator's messages after the end of the job. The coordinator would close a connection whose
        messages are not read."""
        with contextlib.suppress(JobFailedError):
            while (order := await self._client.next()) is not None:
                if isinstance(order, c.UploadSnapshot):
                    self._last_step.name(order.save_id)
        # stop waiting for a save id: no coordinator is left to send it
        self._last_step.name("")

    # --- the socket for workers -----------------------------------------------------------------

    async def _watch_socket(self) -> None:
        while not self._reports.over:
            await asyncio.sleep(_SOCKET_S)
            await self._mend_socket()

    async def _mend_socket(self) -> None:
        """Create the agent's socket file again if it was removed, for example by a program that cleans the temporary
        directory. Does nothing after the end of the job, when the agent itself removes the socket file. The memory
        server itself checks the socket file of the memory server."""
        path = self._settings.agent_socket
        if not self._reports.over and not path.exists():
            sys.stderr.write(f"hyperpod_ext: {path} was removed, and is created again\n")
            make_private_folder(path.parent)
            await self._socket.listen_unix(path)

    # --- leaving --------------------------------------------------------------------------------

    def ask_to_end(self) -> None:
        """Handle SIGTERM, which may have been sent to this node alone. Request to leave the job if the job can continue
        with fewer nodes; otherwise cancel the job."""
        config = self._settings.config
        leaves = config.elastic is not None or config.restart.policy == "continue"
        if not leaves or self.asked_to_leave or not self._client.connected:
            self._cancel()
            return
        self.asked_to_leave = True
        self._reports.tell(c.Leave())

    def _take_notice(self, notice: notices.PreemptionNotice) -> bool:
        """Handle a notice that this node will be reclaimed soon: request to leave the job. Returns False if no
        coordinator is connected, so that the notice must be handled later."""
        if not self._client.connected:
            return False
        if not self.asked_to_leave:
            self._reports.event("preemption_notice", cause=notice.cause, seconds_left=notice.seconds_left)
            self.ask_to_end()
        return True

    def _cancel(self) -> None:
        if self._leadership.coordinator is not None:
            self._leadership.coordinator.cancel()
        else:
            self._reports.report_last(c.CancelJob(), "cancelled")
