"""The agent's client of its node's memory server."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from hyperpod_ext.errors import HyperpodExtError, JobFailedError
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.connections import open_unix
from hyperpod_ext.runtime.ipc.declared import Declared, encode, with_version
from hyperpod_ext.runtime.memory_server.protocol import requests as r
from hyperpod_ext.runtime.memory_server.protocol.request import A, Request, read_answer

_START_S = 30.0
_AGAIN_S = 0.2
"""Seconds after which a request is sent again if its connection broke."""
_PING_S = 3.0
"""Interval of checks that the server answers."""
_MOST_LIMITS = 10
"""Factor for the time limit of a request that waits for earlier requests of a dead rank."""


class Ask(Protocol):
    """Sends a request to the memory server and returns its answer."""

    async def __call__(self, request: Request[A], /) -> A: ...


_LONG = (r.Durable, r.UploadNow, r.WaitIdle, r.WaitState, r.WaitOthers, r.CheckTiers, r.Fetch, r.FetchHead)
"""Requests without a time limit, because they wait for other processes or for storage."""
_SETTINGS = (r.Listen, r.Fence, r.Rescale, r.Peers, r.PeerSchedule, r.ScheduleCopy)
"""Requests that change a setting of the server. The client sends them again to the next server."""


def _setting(request: Request[Any]) -> tuple[object, ...] | None:
    """Return a key for the setting that a request changes; a newer request with the same key replaces it. None if the
    request changes no setting."""
    if not isinstance(request, _SETTINGS):
        return None
    return type(request), getattr(request, "kind", None), isinstance(request, r.Fence) and request.step is None


class AsyncMemoryClient:
    """Sends each request on its own connection. If the server ends before it answers, sends the request to the next
    one.

    Args:
        limit_s: time limit for an answer, in seconds, for requests that do not wait for another process.
    """

    def __init__(self, path: Path, limit_s: float = _START_S / 2) -> None:
        self._path, self._limit_s = path, limit_s
        self.on_silent: Callable[[str], object] = lambda why: None
        """Called with a sentence if no answer comes within `limit_s`. The callback must kill the server."""
        self.ended = ""
        """Why the last server ended; empty while a server runs or another will follow."""
        self._number = 0
        """Number of the current server, from 0."""
        self._change = asyncio.Event()
        """Set when the current server has ended."""
        self._settings: dict[tuple[object, ...], Request[Any]] = {}
        """Newest request for each setting, in the order in which the requests were sent."""

    async def ask(self, request: Request[A]) -> A:
        """Send `request` to the server, and return the answer.

        Raises:
            JobFailedError: the last server has ended, or the server refuses the request.
        """
        deadline = None
        while True:
            change = self._change
            answer = await self._answer(self._path, request)
            if answer is not None:
                break
            try:
                await asyncio.wait_for(change.wait(), _AGAIN_S)
                deadline = None
            except TimeoutError:
                deadline = deadline or time.monotonic() + _START_S
                if time.monotonic() > deadline:
                    why = f"the connection to the memory server broke at each `{type(request).__name__}`"
                    why += f" for {_START_S:g} s"
                    raise JobFailedError(why) from None
        answered = _read(request, answer)
        if (setting := _setting(request)) is not None:
            self._settings.pop(setting, None)  # keep the newest request last
            self._settings[setting] = request
        return answered

    async def watch(self) -> None:
        """Check regularly that the server answers, in order to notice a stopped server."""
        with contextlib.suppress(JobFailedError):
            while True:
                await asyncio.sleep(min(_PING_S, self._limit_s / 4))
                await self.ask(r.Handshake())

    def lost(self, for_good: str = "") -> None:
        """Record that the server has ended. `for_good`: the reason why no other server will follow; else empty."""
        self.ended = for_good
        self._number += 1
        self._change.set()
        self._change = asyncio.Event()

    async def succeed(self, path: Path) -> list[Declared]:
        """Send all settings to the new server at `path`, and use that server from now on.

        Returns:
            The new server's answers; empty if it has ended, too.
        """
        number, answers = self._number, list[Declared]()
        for request in [*self._settings.values(), r.Held()]:
            answer = await self._answer(path, request, number)
            if answer is None:
                return []
            answers.append(_read(request, answer))
        path.rename(self._path)
        return answers

    async def _answer(self, path: Path, request: Request[Any], number: int | None = None) -> wire.Message | None:
        """Return the answer to `request`; None if the server has ended. `number`: number of the server that must
        answer; None for any."""
        line = await self._open(path, number)
        if line is None:
            return None
        reader, writer = line
        writer.write(wire.encode(with_version(encode(request))))
        reading, asked = asyncio.ensure_future(wire.read(reader)), self._number
        limits = _MOST_LIMITS if isinstance(request, r.Held) and request.owner is not None else 1
        slices = math.inf if isinstance(request, _LONG) else 10 * limits
        try:
            # wait in slices, so that a pause of this process does not count as silence of the server
            while not reading.done() and self._number == asked and slices > 0:
                await asyncio.wait({reading}, timeout=self._limit_s / 10)
                slices -= 1
            if reading.done():
                return reading.result()
            if self._number == asked:
                self.on_silent(f"it did not answer `{type(request).__name__}` for {limits * self._limit_s:g} s")
            return None
        except ConnectionError:
            return None
        finally:
            reading.cancel()
            writer.close()

    async def _open(self, path: Path, number: int | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                return await open_unix(path)
            except (FileNotFoundError, ConnectionRefusedError):  # the server is still starting
                if self.ended:
                    raise JobFailedError(f"the memory server of this node is gone: {self.ended}") from None
                if number not in (None, self._number):
                    return None
                if time.monotonic() > deadline:
                    raise JobFailedError(
                        f"the memory server of this node does not answer {_START_S:g} s after it was started",
                        hint="Look at its last lines of output in the node's log.",
                    ) from None
                await asyncio.sleep(0.01)


def _read(request: Request[A], answer: wire.Message) -> A:
    try:
        return read_answer(request, answer)
    except (HyperpodExtError, wire.WireError) as error:
        raise JobFailedError(f"the memory server did not answer: {error}") from error


Held = tuple[tuple[c.HeldSnapshot, ...], tuple[c.HeldPiece, ...]]
"""Snapshots and parity in one node's memory."""


def held_in(answer: r.Snapshots) -> Held:
    snapshots = tuple(c.HeldSnapshot.model_validate(one) for one in answer.snapshots)
    return snapshots, tuple(c.HeldPiece.model_validate(one) for one in answer.pieces)


async def held_at_last(memory: AsyncMemoryClient, ranks: Collection[int]) -> Held:
    """Return the snapshots and parity in this node's memory after all requests of `ranks` were processed. The processes
    of `ranks` must have ended."""
    if memory.ended:
        return (), ()
    for rank in ranks:
        await memory.ask(r.Held(owner=rank, pid=os.getpid()))
    return held_in(await memory.ask(r.Held()))
