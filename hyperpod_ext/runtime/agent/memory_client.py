"""The agent's client for the memory server on the same node."""

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

_SILENT_S, _BROKEN_S = 15.0, 30.0
"""Number of seconds within which a server must answer a request, and for which a request is retried if every connection
for the request breaks."""
_SEE_LOG = "The node's log has the last lines of the memory server's output."
_AGAIN_S = 0.2
"""Number of seconds to wait before a request is sent again after its connection broke."""
_PING_S = 3.0
"""Number of seconds between two checks that the memory server still answers."""
_MOST_LIMITS = 10
"""Factor on the time limit of a request for which the server first handles earlier requests of a dead rank."""


class Ask(Protocol):
    """Type of a function that sends a request to the memory server and returns the answer."""

    async def __call__(self, request: Request[A], /) -> A: ...


_LONG = (r.Durable, r.UploadNow, r.WaitIdle, r.WaitState, r.WaitOthers, r.CheckTiers, r.Fetch, r.FetchHead)
"""Types of requests without a time limit, because the memory server waits for other processes or for storage."""
_SETTINGS = (r.Listen, r.Fence, r.Rescale, r.Peers, r.PeerSchedule, r.ScheduleCopy)
"""Types of requests that change a setting of the memory server. A new memory server gets the newest request for each
setting."""


def _setting(request: Request[Any]) -> tuple[object, ...] | None:
    """Return a key of the setting that a request changes; None if it changes no setting. A new server gets only the
    newest request with each key."""
    if not isinstance(request, _SETTINGS):
        return None
    return type(request), getattr(request, "kind", None), isinstance(request, r.Fence) and request.step is None


class AsyncMemoryClient:
    """Sends requests to the memory server, each over its own connection. If the server ends before it answers, the
    request is sent again to the next server.

    Args:
        limit_s: time limit in seconds for the answer to a request that does not wait for another process.
    """

    def __init__(self, path: Path, limit_s: float = _SILENT_S) -> None:
        self._path, self._limit_s = path, limit_s
        self.on_silent: Callable[[str], object] = lambda why: None
        """Function that must kill the server. Called with an explaining sentence if no answer arrives in time."""
        self.ended = ""
        """Why the last memory server has ended; empty while a server runs or a next server will be started."""
        self._number = 0
        """Number of the current memory server, counted from 0."""
        self._change = asyncio.Event()
        """Event that is set when the current memory server has ended. Each memory server has a new `asyncio.Event`."""
        self._settings: dict[tuple[object, ...], Request[Any]] = {}
        """Newest request of each setting, in the order in which the requests were sent."""

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
                deadline = deadline or time.monotonic() + _BROKEN_S
                if time.monotonic() > deadline:
                    why = "the connection to the memory server of this node broke at every request "
                    why += f"`{type(request).__name__}` for {_BROKEN_S:g} s"
                    raise JobFailedError(why, hint=_SEE_LOG) from None
        answered = _read(request, answer)
        if (setting := _setting(request)) is not None:
            # moves the newest request to the end of the dict
            self._settings.pop(setting, None)
            self._settings[setting] = request
        return answered

    async def watch(self) -> None:
        """Periodically send a request to the memory server, to detect a server that does not answer any more."""
        with contextlib.suppress(JobFailedError):
            while True:
                await asyncio.sleep(min(_PING_S, self._limit_s / 4))
                await self.ask(r.Handshake())

    def lost(self, for_good: str = "") -> None:
        """Record that the memory server has ended. `for_good`: why the server ended, if no next server will be started;
        otherwise empty."""
        self.ended = for_good
        self._number += 1
        self._change.set()
        self._change = asyncio.Event()

    async def succeed(self, path: Path) -> list[Declared]:
        """Send all settings to the new memory server at socket `path`, and use the new server from now on.

        Returns:
            The new server's answers; empty if the new server has ended as well.
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
        """Send `request` to the server at `path`, and return the answer; None if the server has ended. `number`: number
        of the server that must answer; None for any server."""
        line = await self._open(path, number)
        if line is None:
            return None
        reader, writer = line
        writer.write(wire.encode(with_version(encode(request))))
        reading, asked = asyncio.ensure_future(wire.read(reader)), self._number
        limits = _MOST_LIMITS if isinstance(request, r.Held) and request.owner is not None else 1
        slices = math.inf if isinstance(request, _LONG) else 10 * limits
        try:
            # wait in short intervals, so that a pause of this process does not make the server seem silent
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
        deadline = time.monotonic() + r.SERVER_START_S
        while True:
            try:
                return await open_unix(path)
            except (FileNotFoundError, ConnectionRefusedError):
                # the server is still starting, or has ended
                if self.ended:
                    raise JobFailedError(
                        f"the memory server of this node has ended: {self.ended}", hint=_SEE_LOG
                    ) from None
                if number not in (None, self._number):
                    return None
                if time.monotonic() > deadline:
                    raise JobFailedError(
                        f"the memory server of this node does not answer {r.SERVER_START_S:g} s after it was started",
                        hint=_SEE_LOG,
                    ) from None
                await asyncio.sleep(0.01)


def _read(request: Request[A], answer: wire.Message) -> A:
    try:
        return read_answer(request, answer)
    except (HyperpodExtError, wire.WireError) as error:
        raise JobFailedError(f"the memory server did not answer: {error}") from error


Held = tuple[tuple[c.HeldSnapshot, ...], tuple[c.HeldPiece, ...]]
"""The snapshots and the parity pieces (XOR of parts of snapshots) in the memory of one node."""


def held_in(answer: r.Snapshots) -> Held:
    snapshots = tuple(c.HeldSnapshot.model_validate(one) for one in answer.snapshots)
    return snapshots, tuple(c.HeldPiece.model_validate(one) for one in answer.pieces)


async def held_at_last(memory: AsyncMemoryClient, ranks: Collection[int]) -> Held:
    """Return the snapshots and parity pieces in this node's memory, after the server has processed all requests of
    `ranks`. The processes of `ranks` must have ended."""
    if memory.ended:
        return (), ()
    for rank in ranks:
        await memory.ask(r.Held(owner=rank, pid=os.getpid()))
    return held_in(await memory.ask(r.Held()))
