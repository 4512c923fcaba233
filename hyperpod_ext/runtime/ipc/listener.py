"""A listening socket that can close all connections that it has accepted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from hyperpod_ext.runtime.ipc.connections import serve_tcp, serve_unix

Converse = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Listener:
    """Runs `converse` in a task for each accepted connection. If `converse` raises ConnectionError, only its connection
    is closed.

    Any other exception from `converse` is an internal error, whose text is passed to `on_error`.
    """

    def __init__(self, converse: Converse, on_error: Callable[[str], None]) -> None:
        self._converse, self._on_error = converse, on_error
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def listen_tcp(self, host: str, port: int) -> int:
        """Start to listen on `port` of `host`, and return its number. Port 0 selects a free port."""
        self._server = await serve_tcp(self._accept, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def listen_unix(self, path: Path) -> None:
        """Start to listen on a Unix socket that only processes of this user can open. An earlier listening socket of
        this listener is closed."""
        if self._server is not None:
            self._server.close()
        self._server = await serve_unix(self._accept, path)

    async def close(self) -> None:
        """Stop listening, close all connections, and wait until their tasks have ended."""
        if self._server is not None:
            self._server.close()
        for writer in self._open.values():
            writer.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._run(reader, writer))
        self._open[task] = writer
        task.add_done_callback(self._open.pop)

    async def _run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._converse(reader, writer)
        except ConnectionError:
            pass  # the peer has closed the connection or violated the protocol
        except Exception as error:
            self._on_error(f"{type(error).__name__}: {error}")
        finally:
            writer.close()
