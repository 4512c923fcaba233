"""The agent's client of its node's memory server, and the events that it makes of copies to other tiers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from hyperpod_ext.errors import HyperpodExtError, JobFailedError
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.connections import open_unix
from hyperpod_ext.runtime.ipc.declared import Declared, encode, with_version
from hyperpod_ext.runtime.memory_server.protocol import requests as r
from hyperpod_ext.runtime.memory_server.protocol.request import A, Request, read_answer

_START_S = 30.0
_AGAIN_S = 0.2
"""How soon a request is sent again whose connection broke."""
_PING_S = 3.0
"""How often it is looked whether the server answers at all."""
_MOST_LIMITS = 10
"""So many times as long may an answer take that waits for what a dead rank had asked for."""
_WATCH_S = 1.0
"""How often it is looked whether a checkpoint has come to a durable tier."""
_WATCH_ALL = 5
"""Each so many looks, whatever has changed of copies to other tiers is told."""


class Ask(Protocol):
    """Asks the memory server."""

    async def __call__(self, request: Request[A], /) -> A: ...


class Break(Protocol):
    """Says that this node cannot go on."""

    def __call__(self, why: str, *, code: str = ...) -> None: ...


_LONG = (r.Durable, r.UploadNow, r.WaitIdle, r.WaitState, r.WaitOthers, r.CheckTiers, r.Fetch, r.FetchHead)
"""Requests that wait for other processes or for a store."""
_SETTINGS = (r.Listen, r.Fence, r.Rescale, r.Peers, r.PeerSchedule, r.ScheduleCopy)
"""What a memory server is told that the next one must know, too."""


def _setting(request: Request[Any]) -> tuple[object, ...] | None:
    """What a request sets: the newest that sets the same counts. None: nothing that the next server must know."""
    if not isinstance(request, _SETTINGS):
        return None
    return type(request), getattr(request, "kind", None), isinstance(request, r.Fence) and request.step is None


class AsyncMemoryClient:
    """Asks the memory server; each request has a connection of its own. One that ends while it is asked is followed by
    another, which is asked once more. A connection that breaks is made again.

    Args:
        silent: is called with a sentence when the server has not answered in `limit_s`. It has to end that server.
        limit_s: seconds that it has for an answer that waits for nobody.
    """

    def __init__(
        self, path: Path, silent: Callable[[str], object] = lambda why: None, limit_s: float = _START_S / 2
    ) -> None:
        self._path, self._silent, self._limit_s = path, silent, limit_s
        self.ended = ""
        """Why there is none, and none comes."""
        self._number = 0
        """Of the server that is asked."""
        self._change = asyncio.Event()
        self._reported: dict[tuple[object, ...], Request[Any]] = {}

    async def ask(self, request: Request[A]) -> A:
        """The answer.

        Raises:
            JobFailedError: it is gone for good, or refuses.
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
                    why = f"the memory server broke off `{type(request).__name__}` again and again for {_START_S:g} s"
                    raise JobFailedError(why) from None
        answered = _read(request, answer)
        if (setting := _setting(request)) is not None:
            self._reported.pop(setting, None)  # the newest comes last
            self._reported[setting] = request
        return answered

    async def watch(self) -> None:
        """Find a server that is stopped, for as long as there is one to ask."""
        with contextlib.suppress(JobFailedError):
            while True:
                await asyncio.sleep(min(_PING_S, self._limit_s / 4))
                await self.ask(r.Handshake())

    def lost(self, for_good: str = "") -> None:
        """The server has ended. `for_good`: why no other one follows."""
        self.ended = for_good
        self._number += 1
        self._change.set()
        self._change = asyncio.Event()

    async def succeed(self, path: Path) -> list[Declared]:
        """Tell another server, which listens at `path`, what the one before knew, and have it asked from now on.

        Returns its answers; none, when it has ended, too.
        """
        number, answers = self._number, list[Declared]()
        for request in [*self._reported.values(), r.Held()]:
            answer = await self._answer(path, request, number)
            if answer is None:
                return []
            answers.append(_read(request, answer))
        path.rename(self._path)
        return answers

    async def _answer(self, path: Path, request: Request[Any], number: int | None = None) -> wire.Message | None:
        """None: it has ended."""
        line = await self._open(path, number)
        if line is None:
            return None
        reader, writer = line
        writer.write(wire.encode(with_version(encode(request))))
        reading, asked = asyncio.ensure_future(wire.read(reader)), self._number
        try:
            await self._wait_for(reading, request, asked)
            if reading.done():
                return reading.result()
            if self._number == asked:
                self._silent(f"it did not answer `{type(request).__name__}` for {self._limit_of(request):g} s")
            return None
        except ConnectionError:
            return None
        finally:
            reading.cancel()
            writer.close()

    def _limit_of(self, request: Request[Any]) -> float:
        return self._limit_s * (_MOST_LIMITS if isinstance(request, r.Held) and request.owner is not None else 1)

    async def _wait_for(self, reading: asyncio.Future[Any], request: Request[Any], asked: int) -> None:
        """Until the answer is here, its time is over, or the server with the number `asked` has ended. Time in which
        this process stood still does not count."""
        slices = (
            itertools.count()
            if isinstance(request, _LONG)
            else range(int(10 * self._limit_of(request) / self._limit_s))
        )
        for _ in slices:
            await asyncio.wait({reading}, timeout=self._limit_s / 10)
            if reading.done() or self._number != asked:
                return

    async def _open(self, path: Path, number: int | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                return await open_unix(path)
            except (FileNotFoundError, ConnectionRefusedError):  # it is still starting
                if self.ended:
                    raise JobFailedError(f"the memory server of this node is gone: {self.ended}") from None
                if number not in (None, self._number):
                    return None
                if time.monotonic() > deadline:
                    raise JobFailedError(
                        f"the memory server of this node does not answer {_START_S:g} s after it was started",
                        hint="The node's log has its last words.",
                    ) from None
                await asyncio.sleep(0.01)


def _read(request: Request[A], answer: wire.Message) -> A:
    try:
        return read_answer(request, answer)
    except (HyperpodExtError, wire.WireError) as error:
        raise JobFailedError(f"the memory server did not answer: {error}") from error


class CopyMonitor:
    """Makes events of how copies to other tiers go."""

    def __init__(self, ask: Ask, event: Callable[..., None], break_node: Break) -> None:
        self._ask, self._event, self._break = ask, event, break_node
        self._known: dict[str, dict[str, Any]] = {}

    async def watch(self) -> None:
        """For as long as there is a memory server to ask."""
        with contextlib.suppress(OSError, JobFailedError):
            for look in itertools.count(1):
                await asyncio.sleep(_WATCH_S)
                await self.tell(all_changes=look % _WATCH_ALL == 0)

    async def tell(self, *, all_changes: bool = True) -> None:
        """What has changed since it was told last; a failure also to whoever reads the log of this node.

        Not all changes: what has come to a durable tier, or failed to. A job may end at any moment, and its log is to
        have that; copies on peers come and go with each step.
        """
        for status in (await self._ask(r.Status())).copying:
            fields = copying_event(status)
            before = self._known.get(fields["tier"], {})
            if not all_changes and (fields["tier"] == "peer" or _state_of(fields) == _state_of(before)):
                continue
            self._known[fields["tier"]] = fields
            if fields == before or not any(fields[key] for key in fields.keys() - {"tier"}):
                continue
            self._event("copying", **fields)
            if fields["failed"] > before.get("failed", 0):
                sys.stderr.write(f"a copy to {fields['tier']} failed: {fields['last_error']}\n")
            if fields["fell_back"] and fields["fell_back"] != before.get("fell_back"):
                sys.stderr.write(f"copies go over TCP, not by NIXL: {fields['fell_back']}\n")
            if status.get("taken_over"):
                self._break(f"{fields['tier']}: {fields['last_error']}", code="StaleGenerationError")


def _state_of(fields: dict[str, Any]) -> tuple[int | None, int]:
    """Of a durable tier what a report needs: its newest step, and how many did not come."""
    return fields.get("newest_step"), fields.get("failed", 0)


def copying_event(status: dict[str, Any]) -> dict[str, Any]:
    """What the event log keeps of how copying to one tier goes."""
    step = status.get("replicated_step") if status["tier"] == "peer" else status["durable_step"]
    keys = ("tier", "failed", "skipped", "superseded", "last_error")
    return {**{key: status[key] for key in keys}, "newest_step": step, "fell_back": status.get("fell_back", "")}
