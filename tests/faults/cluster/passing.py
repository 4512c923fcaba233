"""Messages that are handed over as the objects that they are, instead of being encoded, read and checked again.

Half of what a simulated cluster costs is JSON and its checks. A declared message is frozen, so that sender and reader
can share it. What is said as a plain object (handshakes), and what holds such (the job state), goes over as bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.declared import Declared, Kinds

_READERS: tuple[Kinds[Any], ...] = (c.AGENT_ORDERS, c.AGENT_REPORTS, c.WORKER_ORDERS, c.WORKER_REPORTS)
_KINDS = frozenset(kind for kinds in _READERS for kind in kinds) - {c.JobState, c.JobStateChange}


class _Passed:
    """Stands for the JSON object of a message, and for its frame."""

    __slots__ = ("message",)

    def __init__(self, message: Declared) -> None:
        self.message = message


Frame = _Passed | bytes


class _Reader(asyncio.StreamReader):
    """Of frames, each as it was written."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.came: deque[Frame] = deque()

    _waiter: asyncio.Future[None] | None

    def feed_data(self, data: Any) -> None:
        self.came.extend(data)
        if (waiter := self._waiter) is not None:
            self._waiter = None
            if not waiter.cancelled():
                waiter.set_result(None)

    async def more(self) -> bool:
        """Whether anything comes."""
        while not self.came:
            if self._eof:  # type: ignore[attr-defined]
                return False
            assert self._waiter is None, "two read from one connection"
            self._waiter = self._loop.create_future()  # type: ignore[attr-defined]
            try:
                await self._waiter
            finally:
                self._waiter = None
            if (error := self.exception()) is not None:
                raise error
        return True


@contextlib.contextmanager
def messages_passed() -> Iterator[None]:
    """While this lasts, on simulated connections."""
    dump, encode, decode = Declared.model_dump, wire.encode, Kinds.decode
    taken = {kinds: frozenset(kinds) for kinds in _READERS}

    def dump_passed(message: Declared, **how: Any) -> Any:
        return _Passed(message) if type(message) in _KINDS and not how else dump(message, **how)

    def encode_passed(message: Any) -> Any:
        return message if type(message) is _Passed else encode(message)

    async def read_passed(reader: _Reader, limit: int = wire.MAX_FRAME_BYTES) -> Any:
        if (error := reader.exception()) is not None:
            raise error
        if not reader.came and not await reader.more():
            return None
        frame = reader.came.popleft()
        if type(frame) is _Passed:
            return frame
        length = wire.body_length(frame[:4], limit)
        return wire.decode(frame[4 : 4 + length])

    def decode_passed(kinds: Kinds[Any], message: Mapping[str, Any] | _Passed) -> Any:
        if type(message) is not _Passed:
            return decode(kinds, message)
        found = message.message
        return found if type(found) in taken[kinds] else decode(kinds, dump(found))

    with (
        mock.patch.object(Declared, "model_dump", dump_passed),
        mock.patch.multiple(wire, encode=encode_passed, read=read_passed),
        mock.patch.object(Kinds, "decode", decode_passed),
        mock.patch.object(asyncio.streams, "StreamReader", _Reader),
    ):
        yield
