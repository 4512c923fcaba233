"""The listener to which other agents connect to vote for this node, and the coordinator that this node runs if it wins
the election."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Protocol

from hyperpod_ext.errors import ConflictError
from hyperpod_ext.files import write_atomically
from hyperpod_ext.ports import free_port
from hyperpod_ext.processes import allow_open_files
from hyperpod_ext.runtime.agent.settings import NodeSettings
from hyperpod_ext.runtime.coordinator.coordinator import Coordinator
from hyperpod_ext.runtime.events.kept import LogUpload
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc import unproven
from hyperpod_ext.runtime.ipc.declared import Address, checked_version, encode, name_of, read
from hyperpod_ext.runtime.ipc.listener import Listener
from hyperpod_ext.runtime.ipc.unproven import Unproven
from hyperpod_ext.runtime.membership.quorum import may_take_over
from hyperpod_ext.runtime.storage.open import open_tier

_UNPROVEN = 1024
"""Limit for simultaneous connections whose peers have not yet proved that they have the job's secret. Large jobs have a
higher limit, from `places_for`."""
_LOOK_S = 0.2
"""Number of seconds between two checks whether another node is the coordinator."""
_OTHER_FILES = 1024
"""Number of open files that an agent needs besides connections of other agents."""
_WHERE = "coordinator.json"
"""Name of the file in the run directory that contains the coordinator's address."""


class Serves(Protocol):
    """The methods of a coordinator that an `ElectionListener` calls."""

    async def serve(
        self,
        handshake: c.AgentHandshake,
        reading: asyncio.Task[wire.Message | None],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None: ...

    async def free_number(self, wanted: int, listens: Address | None) -> int | None: ...


class KnowsJob(Protocol):
    """The attributes and methods of this node's `CoordinatorClient` that an `ElectionListener` uses."""

    news: c.JobNews | None

    @property
    def has_coordinator(self) -> bool: ...

    def heard_since(self, moment: float) -> bool: ...

    def know_gone(self, hosts: Collection[str], *, replaced: bool) -> None: ...


def places_for(nodes: int) -> int:
    """Return the limit for simultaneous connections whose peers have not yet proved that they have the job's secret.
    Also raises this process's limit of open files, to allow so many connections.

    All `nodes` agents, including those of spares, may connect at the same time, each over two connections, in addition
    to unknown clients.
    """
    places = max(_UNPROVEN, 2 * nodes)
    allow_open_files(unproven.FILES_A_PLACE * places)
    if not allow_open_files(nodes + _OTHER_FILES):
        sys.stderr.write(
            f"the coordinator of a job of {nodes} nodes needs up to {nodes + _OTHER_FILES} open files, and this "
            "process may have fewer: raise the hard limit (ulimit -Hn) where agents start\n"
        )
    return places


class ElectionListener:
    """Accepts connections from agents of the job, and passes them to the coordinator on this node. If no coordinator
    runs on this node, each connected agent counts as a vote for this node.

    Args:
        places: limit for simultaneous unauthenticated connections (see `places_for`).
        encrypted: whether agents connect with TLS.
        succeeded: whether the job has ended successfully. After a successful end, agents that connect receive the
            message that the job has ended.
    """

    def __init__(
        self,
        secret: bytes,
        on_error: Callable[[str], None],
        places: int = _UNPROVEN,
        *,
        encrypted: bool = False,
        succeeded: bool = False,
    ) -> None:
        self._secret, self._encrypted, self._succeeded = secret, encrypted, succeeded
        self.client: KnowsJob | None = None
        """This node's connection to the coordinator, which knows the current coordinator."""
        # cancel tasks instead of closing connections, because asyncio fails if a connection is closed during a TLS
        # handshake
        self._unproven: Unproven[asyncio.Task[Any]] = Unproven(unproven.places(places), asyncio.Task.cancel)
        self._listener = Listener(self._serve, on_error)
        self._coordinator: Serves | None = None
        self._released = asyncio.Event()
        """Event that is set when voters must no longer wait for this node to become the coordinator."""
        self.votes: dict[int, c.AgentHandshake] = {}
        """Handshakes of the nodes that vote for this node, and wait until this node becomes the coordinator, by
        node."""
        self._voted = asyncio.Condition()
        self.address = ("", 0)

    async def open(self, host: str, port: int) -> None:
        """Start to accept connections from agents. Port 0 selects a free port.

        Raises:
            OSError: the port is taken.
        """
        self.address = (host, await self._listener.listen_tcp(host, port))

    def lead_to(self, coordinator: Serves) -> None:
        """Pass waiting voters, and agents that connect from now on, to `coordinator`."""
        self._coordinator = coordinator
        self.release_voters()

    async def wait_for_majority(
        self, members: Collection[int], me: int, timeout_s: float, gone: Callable[[], Collection[int]] = tuple
    ) -> bool:
        """Wait for at most `timeout_s` seconds until a majority of `members` votes for node `me`. Returns whether there
        is a majority.

        Args:
            gone: function that returns the nodes that are gone for good, which are not counted as members.
        """

        def enough() -> bool:
            return may_take_over(set(members) - set(gone()), {*self.votes, me})

        try:
            async with asyncio.timeout(timeout_s), self._voted:
                await self._voted.wait_for(enough)
        except TimeoutError:
            return False
        return True

    async def look_again(self) -> None:
        """Count the votes for this node again, because more nodes may be known to be gone for good."""
        await self._change(lambda: None)

    def release_voters(self) -> None:
        """Make voters stop waiting, because this node or another node is the coordinator now."""
        self._released.set()
        self._released = asyncio.Event()

    async def close(self) -> None:
        await self._listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        conversation = asyncio.current_task()
        assert conversation is not None
        self._unproven.enter(conversation)
        try:
            await wire.accept_peer(reader, writer, self._secret, encrypted=self._encrypted)
        finally:
            self._unproven.leave(conversation)
        if (first := await wire.read(reader)) is None:
            return
        try:
            first = checked_version(first, "this node's agent", "the agent that connected")
            if first.get("type") == name_of(c.AskNumber, "type"):
                answer = await self._number(read(c.AskNumber, first, "question"))
                writer.write(wire.encode(encode(answer)))
                await writer.drain()
                return
            handshake = read(c.AgentHandshake, first, "handshake")
        except wire.WireError as error:
            sys.stderr.write(f"an agent was refused: {error}\n")
            writer.write(wire.encode(encode(c.StopNode(why=str(error), hint=""))))
            await writer.drain()
            return
        if self._succeeded:
            # send the end of the job to an agent that has joined too late, or has missed the earlier message
            writer.write(wire.encode(encode(c.EndJob(state="succeeded", grace_s=-1.0))))
            await writer.drain()
            return
        reading = asyncio.create_task(wire.read(reader))
        try:
            if self._coordinator is None:
                await self._hold_vote(handshake, reading, writer)
            if self._coordinator is not None:
                await self._coordinator.serve(handshake, reading, reader, writer)
        finally:
            reading.cancel()

    async def _number(self, asked: c.AskNumber) -> c.FreeNumber:
        if asked.listens is not None and self.client is not None:
            # a new agent at an address shows that the former agent at this address has ended
            self.client.know_gone([asked.listens[0]], replaced=True)
        news, coordinator = self._news, self._coordinator
        node = await coordinator.free_number(asked.wanted, asked.listens) if coordinator is not None else None
        where = news.candidates.get(news.coordinator) if news is not None else None
        return c.FreeNumber(node=node, knows_job=news is not None, coordinator=where, succeeded=self._succeeded)

    async def _hold_vote(
        self, handshake: c.AgentHandshake, reading: asyncio.Task[wire.Message | None], writer: asyncio.StreamWriter
    ) -> None:
        """Count a vote for this node until this node becomes the coordinator, the connection closes, or the voter sends
        another message.

        If another node is the coordinator, answer with this node's `JobNews`, even if the voter has lost this
        coordinator.
        """
        node, arrived = handshake.node, time.monotonic()
        await self._change(lambda: self.votes.update({node: handshake}))
        released = asyncio.create_task(self._released.wait())
        try:
            while self._coordinator is None and not self._knows_another(handshake, arrived):
                done, _ = await asyncio.wait({reading, released}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    break
        finally:
            released.cancel()
            if self._coordinator is None and self.votes.get(node) is handshake:
                await self._change(lambda: self.votes.pop(node, None))
        if (
            self._coordinator is None
            and handshake.knows_job
            and not reading.done()
            and (news := self._news) is not None
        ):
            writer.write(wire.encode(encode(news)))
            await writer.drain()

    def _knows_another(self, handshake: c.AgentHandshake, arrived: float) -> bool:
        """Return whether the voter should connect to the coordinator to which this node is connected. The voter should
        connect if that coordinator is newer than the one that the voter has lost, or if the lost coordinator has sent
        this node a message since the vote arrived.

        Args:
            arrived: time at which the vote arrived (a value of `time.monotonic()`).
        """
        if self.client is None or not self.client.has_coordinator:
            return False
        if not handshake.knows_job or (news := self._news) is None:
            return not handshake.knows_job
        return news.term > handshake.term or (news.term == handshake.term and self.client.heard_since(arrived))

    @property
    def _news(self) -> c.JobNews | None:
        return self.client.news if self.client is not None else None

    async def _change(self, change: Callable[[], object]) -> None:
        async with self._voted:
            change()
            self._voted.notify_all()


class Leadership:
    """Runs the coordinator in this node's agent: on node 0 from the start of the job, on any other node after it is
    elected."""

    def __init__(self, settings: NodeSettings) -> None:
        config = settings.config
        self._settings = settings
        self._others = itertools.cycle(settings.others)
        self.coordinator: Coordinator | None = None
        """The coordinator, if it runs on this node; otherwise None."""
        self._log_upload: LogUpload | None = None
        places = places_for(config.most_nodes + config.spares)
        self.election = ElectionListener(settings.secret, self._broke, places, encrypted=config.encrypted)

    async def begin(self) -> None:
        """Start the first coordinator of the job on this node.

        Raises:
            ConflictError: the port is taken.
        """
        settings = self._settings
        await self.listen(settings.host, settings.port)
        port = free_port(settings.host)
        self._lead(Coordinator.first(settings.config, settings.node, settings.run_dir, port))

    async def listen(self, host: str, port: int) -> None:
        """Start to accept connections from other agents.

        Raises:
            ConflictError: the port is taken.
        """
        try:
            await self.election.open(host, port)
        except OSError as error:
            raise ConflictError(
                f"cannot listen on {host}:{port}: {error.strerror}",
                hint="Set rendezvous.port to a free port, or to 0 where the target can choose one.",
            ) from error

    def take_over(self, own: c.AgentHandshake, votes: list[c.AgentHandshake], gone: frozenset[int]) -> None:
        """Start a coordinator on this node, which replaces a lost coordinator after an election.

        Args:
            own: handshake of this node's agent.
            votes: handshakes of the agents that voted for this node.
            gone: nodes that are gone for good.
        """
        settings = self._settings
        self._lead(Coordinator.successor(settings.config, settings.node, settings.run_dir, own, votes, gone))

    def endpoint(self) -> tuple[str, int]:
        """Return the address at which to look for the coordinator. An agent that joins a running job reads the
        coordinator's address from the run directory."""
        settings = self._settings
        if settings.others:
            return next(self._others)
        if settings.rejoin:
            # use the address in the settings if the file is missing or invalid
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                host, port = json.loads((settings.run_dir / _WHERE).read_text())["address"]
                return str(host), int(port)
        return settings.host, settings.port

    async def close(self) -> None:
        await self.election.close()
        if self.coordinator is not None:
            await self.coordinator.close()
        if self._log_upload is not None:
            await asyncio.to_thread(self._log_upload.close)

    def _lead(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.election.lead_to(coordinator)
        coordinator.show()
        self._write_address()
        config = self._settings.config
        if self._settings.keep_events and (shared := config.checkpoint.shared()):
            place = partial(open_tier, shared[0], config.name)
            self._log_upload = LogUpload(coordinator.events.path, place, self._settings.node)

    def _write_address(self) -> None:
        """Write the coordinator's address to a file, for agents that join later. An error is only logged, because
        running agents do not need this file."""
        path = self._settings.run_dir / _WHERE
        try:
            write_atomically(path, json.dumps({"address": self.election.address}) + "\n")
        except OSError as error:
            sys.stderr.write(f"hyperpod_ext: {path} cannot be written: {error}\n")

    def _broke(self, why: str) -> None:
        if self.coordinator is not None:
            self.coordinator.broke(why)
