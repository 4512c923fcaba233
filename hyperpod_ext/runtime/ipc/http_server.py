"""An HTTP/1.1 server for requests of the HyperPod operator and for metrics, which needs no package except asyncio."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from hyperpod_ext.runtime.ipc import unproven
from hyperpod_ext.runtime.ipc.listener import Listener
from hyperpod_ext.runtime.ipc.unproven import Unproven

_HEADER_BYTES = 64 << 10
_BODY_BYTES = 32 << 20
"""Maximum size of a request body. The largest legitimate body lists the addresses of 100,000 nodes, in about 5 MB."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PLACES = 256
_ANSWERED = 64
"""Maximum number of connections whose client has not read the response yet. The number is limited because each unread
response stays in memory."""
_LIMIT_S = 60.0


@dataclass(frozen=True)
class Request:
    """One HTTP request that the server has received."""

    method: str
    path: str
    body: bytes
    caller: str
    """IP address of the client."""


@dataclass(frozen=True)
class Response:
    """The response to an HTTP request."""

    status: int
    content: Any = None
    """Body of the response: bytes, or an object that is sent as JSON, or None for an empty body."""
    content_type: str = "application/json"


Handle = Callable[[Request], Response]


class HttpServer:
    """HTTP server that answers the requests of one connection in the order in which they arrive.

    Args:
        handle: function that returns the response to a request without blocking.
        on_error: function that is called with the text of an internal error.
        places: maximum number of connections from which no complete request has arrived yet. If `places` is exceeded,
            the server closes the oldest of these connections, so that this process does not run out of file
            descriptors. If too many connections have an unread response, the server closes the oldest connection with
            an unread response.
        limit_s: time limit for receiving one request and sending its response, in seconds.
        keeps: whether a connection may stay open for further requests.
    """

    def __init__(
        self,
        handle: Handle,
        on_error: Callable[[str], None],
        places: int = _PLACES,
        limit_s: float = _LIMIT_S,
        *,
        keeps: bool = True,
    ) -> None:
        self._handle, self._limit_s, self._keeps = handle, limit_s, keeps
        self._asking: Unproven[asyncio.StreamWriter] = Unproven(unproven.places(places), _hang_up)
        self._answered: Unproven[asyncio.StreamWriter] = Unproven(min(places, _ANSWERED), _hang_up)
        self._listener = Listener(self._serve, on_error)

    async def listen(self, host: str, port: int) -> int:
        """Start to listen on `port`, and return its number. Port 0 selects a free port.

        Raises:
            OSError: another process uses the port.
        """
        return await self._listener.listen_tcp(host, port)

    async def close(self) -> None:
        await self._listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (peer := writer.get_extra_info("peername")) is None:
            return  # the client closed the connection before it was accepted
        try:
            while True:
                async with asyncio.timeout(self._limit_s):
                    if not await self._converse(str(peer[0]), reader, writer):
                        return
        except (TimeoutError, asyncio.IncompleteReadError):
            _hang_up(writer)

    async def _converse(self, caller: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Receive one request and send the response. Returns whether the connection stays open for another request."""
        keeps = False
        try:
            with self._asking.place(writer):
                head = await _read_head(reader)
                if head is None:
                    return False
                if head.headers.get("expect", "").lower() == "100-continue":
                    writer.write(_CONTINUE)
                body = await _read_body(reader, head.headers)
            response, keeps = self._handle(Request(head.method, head.path, body, caller)), self._keeps and head.keeps
        except _BadRequestError as error:
            response = Response(error.status, {"detail": str(error)})
        with self._answered.place(writer):
            writer.write(_text(response, keep=keeps))
            await writer.drain()
            if not keeps:
                writer.close()
                # the time limit also applies until the client has read the response
                await writer.wait_closed()
        return keeps


def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


@dataclass(frozen=True)
class _Head:
    """Request line and headers of an HTTP request."""

    method: str
    path: str
    """Path in the URL of the request, without the query string."""
    headers: Mapping[str, str]
    """Maps the name of each header, in lower case, to its value."""
    version: str

    @property
    def keeps(self) -> bool:
        """Whether the client wants to keep the connection open. An HTTP/1.0 client must request to keep the connection,
        because in HTTP/1.0 the server normally closes the connection to end a response."""
        words = {word.strip().lower() for word in self.headers.get("connection", "").split(",")}
        return "keep-alive" in words if self.version == "HTTP/1.0" else "close" not in words


class _BadRequestError(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


async def _read_head(reader: asyncio.StreamReader) -> _Head | None:
    """Return the request line and headers of the next request; None if the client has closed the connection."""
    lines: list[str] = []
    size = 0
    while (line := await _line(reader)) not in ("", "\r\n", "\n"):
        size += len(line)
        if size > _HEADER_BYTES:
            raise _BadRequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers are too long")
        lines.append(line.strip())
    if not lines:
        return None
    parts = lines[0].split()
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise _BadRequestError(HTTPStatus.BAD_REQUEST, "this is not an HTTP/1.1 request")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    return _Head(parts[0], parts[1].partition("?")[0], headers, parts[2])


async def _line(reader: asyncio.StreamReader) -> str:
    try:
        return (await reader.readline()).decode("latin-1")
    except ValueError:
        raise _BadRequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "a line is too long") from None


async def _read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if "transfer-encoding" in headers:
        return await _chunks(reader)
    length = headers.get("content-length", "0")
    if not length.isdecimal():
        raise _BadRequestError(HTTPStatus.BAD_REQUEST, "Content-Length is not a number")
    if int(length) > _BODY_BYTES:
        raise _BadRequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the body is too long")
    return await reader.readexactly(int(length))


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        size = (await _line(reader)).partition(";")[0].strip()
        try:
            length = int(size, 16)
        except ValueError:
            raise _BadRequestError(HTTPStatus.BAD_REQUEST, "a chunk has no length") from None
        if length < 0 or len(body) + length > _BODY_BYTES:
            raise _BadRequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the body is too long")
        if length == 0:
            while await _line(reader) not in ("", "\r\n", "\n"):
                pass
            return body
        body += await reader.readexactly(length)
        await reader.readexactly(2)


def _text(response: Response, *, keep: bool) -> bytes:
    body = b"" if response.content is None else response.content
    if not isinstance(body, bytes):
        body = json.dumps(body, ensure_ascii=False).encode()
    head = [f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}", f"content-length: {len(body)}"]
    if body:
        head.append(f"content-type: {response.content_type}")
    # an HTTP/1.0 client keeps its connection open only if the response has the header `connection: keep-alive`
    head.append(f"connection: {'keep-alive' if keep else 'close'}")
    return "\r\n".join([*head, "", ""]).encode() + body
