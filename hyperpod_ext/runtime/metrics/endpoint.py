"""GET /metrics, in the process that coordinates. What reads too slowly or asks for something else is sent away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from hyperpod_ext.runtime.ipc.listener import Listener
from hyperpod_ext.runtime.metrics.families import CONTENT_TYPE

_TIMEOUT_S = 5.0
_LONGEST_HEAD = 8192


class MetricsEndpoint:
    """Serves one text, made anew for each request.

    Args:
        text: makes it.
        on_error: hears of errors of our own.
    """

    def __init__(self, text: Callable[[], str], on_error: Callable[[str], None]) -> None:
        self._text = text
        self._listener = Listener(self._answer, on_error)

    async def open(self, host: str, port: int) -> int:
        """Listen; returns the port, which is a free one when `port` is 0.

        Raises:
            OSError: the port is taken.
        """
        return await self._listener.listen_tcp(host, port)

    async def close(self) -> None:
        await self._listener.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                status, body = self._respond(head[:_LONGEST_HEAD])
                kind = CONTENT_TYPE if status.startswith("200") else "text/plain"
                lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
                writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode() + body)
                await writer.drain()

    def _respond(self, head: bytes) -> tuple[str, bytes]:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method != b"GET":
            return "405 Method Not Allowed", b"only GET\n"
        if path != b"/metrics":
            return "404 Not Found", b"the metrics are at /metrics\n"
        return "200 OK", self._text().encode()
