"""GET /metrics, in the process that coordinates. What reads too slowly or asks for something else is sent away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hyperpod_ext.config.metrics import SUMMARY
from hyperpod_ext.runtime.ipc import unproven
from hyperpod_ext.runtime.ipc.listener import Listener
from hyperpod_ext.runtime.ipc.unproven import Unproven
from hyperpod_ext.runtime.metrics.families import CONTENT_TYPE

_TIMEOUT_S = 5.0
_LONGEST_HEAD = 8192
_PLACES = 1024
"""Connections at a time that have not asked yet. Nobody proves anything here: when all places are taken, the oldest is
hung up on. Many may come between two looks of a busy process, and whoever asked before them is to be heard."""
_ANSWERED = 64
"""Those at a time that have asked: each may hold an answer that it does not read."""


class MetricsEndpoint:
    """Serves two texts, made anew for each request.

    Args:
        text: makes the numbers as Prometheus reads them.
        summary: makes those that `hp-ext top` shows, as JSON; empty: there are none.
        on_error: hears of errors of our own.
    """

    def __init__(
        self,
        text: Callable[[], str],
        summary: Callable[[], str],
        on_error: Callable[[str], None],
        places: int = _PLACES,
    ) -> None:
        self._answers = {b"/metrics": (CONTENT_TYPE, text), SUMMARY.encode(): ("application/json", summary)}
        self._listener = Listener(self._converse, on_error)
        self._asking: Unproven[asyncio.StreamWriter] = Unproven(unproven.places(places), _hang_up)
        self._answered: Unproven[asyncio.StreamWriter] = Unproven(_ANSWERED, _hang_up)

    async def open(self, host: str, port: int) -> int:
        """Listen; returns the port, which is a free one when `port` is 0.

        Raises:
            OSError: the port is taken.
        """
        return await self._listener.listen_tcp(host, port)

    async def close(self) -> None:
        await self._listener.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                with self._asking.place(writer):
                    head = await reader.readuntil(b"\r\n\r\n")
                with self._answered.place(writer):
                    await self._answer(head, writer)
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            _hang_up(writer)

    async def _answer(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        status, kind, body = self._respond(head[:_LONGEST_HEAD])
        lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
        writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode() + body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()  # a reader that takes nothing holds what it asked for no longer than this

    def _respond(self, head: bytes) -> tuple[str, str, bytes]:
        """Status, type and body."""
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method != b"GET":
            return "405 Method Not Allowed", "text/plain", b"only GET\n"
        if path not in self._answers:
            return "404 Not Found", "text/plain", b"the metrics are at /metrics\n"
        kind, make = self._answers[path]
        return "200 OK", kind, make().encode()


def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
