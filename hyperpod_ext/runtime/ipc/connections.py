"""Connections that raise ConnectionError for every error of the kernel or of TLS.

The kernel has many errors for a connection (ETIMEDOUT, EHOSTUNREACH, ENOBUFS, ...), and TLS has its own errors. An
error of the kernel or of TLS ends only the connection on which it occurs. Callers can catch ConnectionError for all
errors of a connection, without also catching errors of file access.
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
"""Maximum number of connections that wait to be accepted. All nodes of a job connect to the coordinator at the same
time when the job starts or when a new coordinator takes over."""
_READ_AHEAD = 1 << 16
"""Number of received bytes that a stream buffers before it stops reading from the socket. The value is the same as
asyncio's default."""


class BrokenConnectionError(ConnectionError):
    """Raised if the kernel or TLS reports an error on an open connection."""


def broken(error: BaseException) -> ConnectionError:
    """Return the ConnectionError for an error on an open connection.

    A ConnectionRefusedError is also replaced by a BrokenConnectionError. Otherwise callers would conclude that no
    process listens at the port.
    """
    if isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError):
        return error
    return BrokenConnectionError(f"the connection broke: {type(error).__name__}: {error}")


@contextlib.contextmanager
def breaking(*, connects: bool = False) -> Iterator[None]:
    """Convert errors of a blocking socket that are raised in the `with` block to ConnectionError. The block may contain
    only reads and writes of the socket.

    Args:
        connects: whether the block also connects the socket. If `connects` is True, ConnectionRefusedError is raised
            unchanged.

    Raises:
        ConnectionError: the kernel or TLS reported an error of the connection.
        TimeoutError: the socket's own time limit (`settimeout`) has passed, after which the connection may still be
            good.
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
    """Shut the socket down, which wakes all threads that wait on it in this process and in the peer."""
    with contextlib.suppress(OSError):
        # use `shutdown` of the base class, because SSLSocket's would let other threads continue without TLS
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _Protocol(asyncio.StreamReaderProtocol):
    """An asyncio protocol whose streams raise only ConnectionError in `read`, `drain` and `wait_closed`."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(None if exc is None else broken(exc))


def _reader() -> asyncio.StreamReader:
    # look up StreamReader at each call, because the cluster simulation replaces it
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
    """Return asyncio streams for a socket that is already connected."""
    return await _opened(lambda factory: asyncio.get_running_loop().create_connection(factory, sock=sock))


async def serve_tcp(converse: Converse, host: str, port: int) -> asyncio.Server:
    """Start a server that calls `converse` for each connection to a TCP port.

    Raises:
        OSError: another process uses the port.
    """
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: _Protocol(_reader(), converse, loop=loop), host, port, backlog=BACKLOG)


async def serve_unix(converse: Converse, path: Path) -> asyncio.Server:
    """Start a server that calls `converse` for each connection to a Unix socket. Only processes of this user can open
    the socket."""
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: _Protocol(_reader(), converse, loop=loop), str(path))
    path.chmod(0o600)
    return server
