"""Connections that raise a ConnectionError after every kind of break.

The kernel has many errors for a connection (ETIMEDOUT, EHOSTUNREACH, ENOBUFS, ...), and TLS has its own errors. Each
such error ends one connection. Code that catches ConnectionError handles all of them, and does not catch errors of
files by mistake.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Converse = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None]
BACKLOG = 4096
"""Maximum number of connections that wait to be accepted. All nodes of a job connect at once after the job's start or
the loss of its coordinator."""
_READ_AHEAD = 1 << 16
"""Bytes that a reader buffers before it stops reading, as by asyncio's own default."""


class BrokenConnectionError(ConnectionError):
    """The kernel or TLS has reported an error on this connection."""


def broken(error: BaseException) -> ConnectionError:
    """Return the ConnectionError for an error on an open connection.

    ConnectionRefusedError is replaced, too, because callers take it to mean that no process listens at the port.
    """
    if isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError):
        return error
    return BrokenConnectionError(f"the connection broke: {type(error).__name__}: {error}")


@contextlib.contextmanager
def breaking(*, connects: bool = False) -> Iterator[None]:
    """Convert errors of a blocking socket inside the block. The block must contain only reads and writes of the socket.

    Args:
        connects: whether the block also connects the socket. ConnectionRefusedError is then raised unchanged.

    Raises:
        ConnectionError: any error of the connection.
        TimeoutError: the socket's own time limit (`settimeout`) has passed. The connection may still be good.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, TimeoutError) and error.errno is None:
            raise
        if connects and isinstance(error, ConnectionRefusedError):
            raise
        if (reported := broken(error)) is error:
            raise
        raise reported from error


def disconnect(sock: socket.socket) -> None:
    """Wake all threads that wait on the socket, in this process and in the peer."""
    with contextlib.suppress(OSError):
        # SSLSocket's own `shutdown` would make other threads continue without TLS
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _Protocol(asyncio.StreamReaderProtocol):
    """A protocol whose streams raise only ConnectionError in reads, drains and closes."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(None if exc is None else broken(exc))


def _reader() -> asyncio.StreamReader:
    # look up the class at each call, because the cluster simulation replaces it
    return asyncio.streams.StreamReader(limit=_READ_AHEAD, loop=asyncio.get_running_loop())


async def _opened(connect: Callable[[Callable[[], _Protocol]], Awaitable[tuple[Any, Any]]]) -> Connection:
    loop, reader = asyncio.get_running_loop(), _reader()
    protocol = _Protocol(reader, loop=loop)
    transport, _ = await connect(lambda: protocol)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def open_tcp(host: str, port: int) -> Connection:
    """Return a connection to a TCP server.

    Raises:
        OSError: no process listens at the port.
    """
    return await _opened(lambda factory: asyncio.get_running_loop().create_connection(factory, host, port))


async def open_unix(path: Path) -> Connection:
    """Return a connection to a server on a Unix socket.

    Raises:
        OSError: no process listens at the socket.
    """
    return await _opened(lambda factory: asyncio.get_running_loop().create_unix_connection(factory, str(path)))


async def open_over(sock: socket.socket) -> Connection:
    """Return the streams of a connected socket."""
    return await _opened(lambda factory: asyncio.get_running_loop().create_connection(factory, sock=sock))


async def serve_tcp(converse: Converse, host: str, port: int) -> asyncio.Server:
    """Call `converse` for each connection to a TCP port.

    Raises:
        OSError: the port is taken.
    """
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: _Protocol(_reader(), converse, loop=loop), host, port, backlog=BACKLOG)


async def serve_unix(converse: Converse, path: Path) -> asyncio.Server:
    """Call `converse` for each connection to a Unix socket that only this user can open."""
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: _Protocol(_reader(), converse, loop=loop), str(path))
    path.chmod(0o600)
    return server
