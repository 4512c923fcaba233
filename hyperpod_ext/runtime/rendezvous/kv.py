"""A key-value server in each node's agent. Together they are the store that process groups meet in.

Each key has one owner node, so no single process serves them all and none must survive (`store.py` routes).
Keys carry their generation: when one ends, whoever still waits for its keys is told so at once.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable

from hyperpod_ext.runtime import wire
from hyperpod_ext.runtime.listener import Listener


class KeyValueServer:
    """Keys of one node, over TCP, for processes that hold the job's secret."""

    def __init__(self, secret: bytes, on_error: Callable[[str], None]) -> None:
        self._secret = secret
        self._generation = 0
        self._closing = False
        self._values: dict[tuple[int, str], str] = {}
        self._changed = asyncio.Condition()
        self._listener = Listener(self._serve, on_error)
        self.requests = 0

    async def start(self, host: str) -> int:
        """Listen on a free port of `host`; returns the port."""
        return await self._listener.listen_tcp(host, 0)

    async def close(self) -> None:
        """Hang up on everybody, waiting or not."""
        self._closing = True
        await self.enter(self._generation)
        await self._listener.close()

    async def enter(self, generation: int) -> None:
        """Drop the keys of older generations and free everybody who waits for one."""
        async with self._changed:
            self._generation = max(self._generation, generation)
            self._values = {key: value for key, value in self._values.items() if key[0] >= self._generation}
            self._changed.notify_all()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await wire.accept_peer(reader, writer, self._secret)
        while (request := await wire.read(reader)) is not None:
            self.requests += 1
            writer.write(wire.encode(await self._answer(request)))
            await writer.drain()

    async def _answer(self, request: wire.Message) -> wire.Message:
        key = (int(request["generation"]), str(request["key"]))
        match request.get("op"):
            case "set":
                async with self._changed:
                    self._values[key] = str(request["value"])
                    self._changed.notify_all()
                return {}
            case "get":
                return await self._get(key, float(request["timeout"]))
            case "check":
                return {"found": key in self._values}
            case "add":
                async with self._changed:
                    total = int(base64.b64decode(self._values.get(key, "")) or 0) + int(request["amount"])
                    self._values[key] = base64.b64encode(str(total).encode()).decode()
                    self._changed.notify_all()
                return {"value": total}
        return {"error": f"unknown op {request.get('op')!r}"}

    async def _get(self, key: tuple[int, str], timeout: float) -> wire.Message:
        def settled() -> bool:
            return key in self._values or key[0] < self._generation or self._closing

        try:
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(settled)
        except TimeoutError:
            return {"error": f"nobody set {key[1]!r} within {timeout:.0f} s"}
        if key not in self._values:
            return {"error": f"generation {key[0]} is over; the job is at {self._generation}"}
        return {"value": self._values[key]}
