"""Where other agents reach this one. It leads to the coordinator, if that is here; else those who come are votes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection
from typing import Any, Protocol

from hyperpod_ext.processes import allow_open_files
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc import unproven
from hyperpod_ext.runtime.ipc.declared import Address, checked_version, encode, name_of, read
from hyperpod_ext.runtime.ipc.listener import Listener
from hyperpod_ext.runtime.ipc.unproven import Unproven
from hyperpod_ext.runtime.membership.quorum import may_take_over

_UNPROVEN = 1024
"""Least number of connections at a time that have not shown the secret yet."""
_LOOK_S = 0.2
"""How often it is looked whether another coordinates."""
_OTHER_FILES = 1024
"""Files that an agent has open beside the connections of others."""


class Serves(Protocol):
    """A coordinator, as an `ElectionListener` sees it."""

    async def serve(
        self,
        handshake: c.AgentHandshake,
        reading: asyncio.Task[wire.Message | None],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None: ...

    async def free_number(self, wanted: int, listens: Address | None) -> int | None: ...


def places_for(nodes: int) -> int:
    """Places for connections that have not shown the secret yet: all agents of a job of `nodes` nodes, spares included,
    may come at once, and again, while strangers come. Lets this process open as many files as that takes.
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
    """Listens for agents of the job, from this one's start to its end.

    Args:
        places: connections at a time that have not shown the secret yet, as `places_for` has it.
        encrypted: whether agents speak TLS.
        has_coordinator: whether this node has one elsewhere. Who is new in the job and looks for it is hung up on then.
        news: what this node knows of the job.
        begun_anew: is told the host of an agent that looks for its place: a former one there is gone.
        succeeded: whether the job has come to its end, so that nobody is needed any more.
    """

    def __init__(
        self,
        secret: bytes,
        on_error: Callable[[str], None],
        places: int = _UNPROVEN,
        *,
        encrypted: bool = False,
        has_coordinator: Callable[[], bool] = lambda: False,
        news: Callable[[], c.JobNews | None] = lambda: None,
        begun_anew: Callable[[str], object] = lambda host: None,
        succeeded: bool = False,
    ) -> None:
        self._secret, self._encrypted, self._has_coordinator = secret, encrypted, has_coordinator
        self._news, self._begun_anew, self._succeeded = news, begun_anew, succeeded
        # not the connection: asyncio breaks when that is closed in the middle of a TLS handshake
        self._unproven: Unproven[asyncio.Task[Any]] = Unproven(unproven.places(places), asyncio.Task.cancel)
        self._listener = Listener(self._serve, on_error)
        self._coordinator: Serves | None = None
        self._opened = asyncio.Event()
        self._let_go = asyncio.Event()
        self.votes: dict[int, c.AgentHandshake] = {}
        """What each node said that wants this one to coordinate, and waits."""
        self._voted = asyncio.Condition()
        self.address = ("", 0)

    async def open(self, host: str, port: int) -> None:
        """Listen; port 0 is any free one.

        Raises:
            OSError: the port is taken.
        """
        self.address = (host, await self._listener.listen_tcp(host, port))

    def lead_to(self, coordinator: Serves) -> None:
        """From now on, whoever comes or waits is the coordinator's."""
        self._coordinator = coordinator
        self._opened.set()

    async def wait_for_majority(
        self, members: Collection[int], me: int, timeout_s: float, gone: Callable[[], Collection[int]] = tuple
    ) -> bool:
        """Whether, within the time, more than half of `members` want this node to coordinate; those that are `gone` for
        good by then do not count."""

        def enough() -> bool:
            return may_take_over(set(members) - set(gone()), {*self.votes, me})

        try:
            async with asyncio.timeout(timeout_s), self._voted:
                await self._voted.wait_for(enough)
        except TimeoutError:
            return False
        return True

    async def look_again(self) -> None:
        """Others are gone for good: who waits for a majority may have one."""
        await self._change(lambda: None)

    def let_go(self) -> None:
        """This node has a coordinator elsewhere: those that want it to coordinate are told which."""
        self._let_go.set()
        self._let_go = asyncio.Event()

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
            first = checked_version(first, "this node's agent", "the one that reached it")
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
        if self._succeeded:  # it was given a place just before the end, or has not heard of that
            writer.write(wire.encode(encode(c.EndJob(state="succeeded", grace_s=-1.0))))
            await writer.drain()
            return
        reading = asyncio.create_task(wire.read(reader))
        try:
            if self._coordinator is None:
                await self._keep(handshake, reading, writer)
            if self._coordinator is not None:
                await self._coordinator.serve(handshake, reading, reader, writer)
        finally:
            reading.cancel()

    async def _number(self, asked: c.AskNumber) -> c.FreeNumber:
        if asked.listens is not None:
            self._begun_anew(asked.listens[0])
        news = self._news()
        coordinator = self._coordinator
        node = await coordinator.free_number(asked.wanted, asked.listens) if coordinator is not None else None
        where = news.candidates.get(news.coordinator) if news is not None else None
        return c.FreeNumber(node=node, knows_job=news is not None, coordinator=where, succeeded=self._succeeded)

    async def _keep(
        self, handshake: c.AgentHandshake, reading: asyncio.Task[wire.Message | None], writer: asyncio.StreamWriter
    ) -> None:
        """Hold a vote until it counts, or is taken back: its node goes, or says more than it should. It is given back,
        with what this node knows of the job, where this node has a coordinator again."""
        node = handshake.node
        await self._change(lambda: self.votes.update({node: handshake}))
        let_go = asyncio.create_task(self._let_go.wait())
        opened = asyncio.create_task(self._opened.wait())
        every_s = None if handshake.knows_job else _LOOK_S
        try:
            while not self._knows_another(handshake):
                waits = {reading, opened, let_go}
                done, _ = await asyncio.wait(waits, timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    break
        finally:
            opened.cancel()
            let_go.cancel()
            if self._coordinator is None and self.votes.get(node) is handshake:
                await self._change(lambda: self.votes.pop(node, None))
        if (
            self._coordinator is None
            and handshake.knows_job
            and not reading.done()
            and (news := self._news()) is not None
        ):
            writer.write(wire.encode(encode(news)))
            await writer.drain()

    def _knows_another(self, handshake: c.AgentHandshake) -> bool:
        """Whether this node has a coordinator that who has come does not know of."""
        if not handshake.knows_job:
            return self._has_coordinator()
        news = self._news()
        return news is not None and news.term > handshake.term and self._has_coordinator()

    async def _change(self, change: Callable[[], object]) -> None:
        async with self._voted:
            change()
            self._voted.notify_all()
