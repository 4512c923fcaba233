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
_PLACES = 64
"""Connections at a time. Nobody proves anything here: when all places are taken, the oldest is hung up on."""


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
        self._places: Unproven[asyncio.StreamWriter] = Unproven(
            unproven.places(places), lambda writer: writer.transport.abort()
        )

    async def open(self, host: str, port: int) -> int:
        """Listen; returns the port, which is a free one when `port` is 0.

        Raises:
            OSError: the port is taken.
        """
        return await self._listener.listen_tcp(host, port)

    async def close(self) -> None:
        await self._listener.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._places.enter(writer)
        try:
            await self._answer(reader, writer)
        finally:
            self._places.leave(writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                status, kind, body = self._respond(head[:_LONGEST_HEAD])
                lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
                writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode() + body)
                await writer.drain()
                writer.close()
                await writer.wait_closed()  # a reader that takes nothing holds what it asked for no longer than this
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.transport.abort()

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
