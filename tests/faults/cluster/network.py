"""Connections between simulated processes: they take time, keep their order, and break.

A machine that cannot be reached says nothing: what is sent to it waits, and comes when it can be reached again.
"""

from __future__ import annotations

import asyncio
import os
import random
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

from .event_loop import PROCESS, Process, SimulatedLoop

_LOCAL_S = 20e-6
_FIRST_PORT = 40_000


class _Socket:
    """What code asks the socket of a connection. `process`: the one at its other end."""

    def __init__(self, process: Process) -> None:
        self._pid = getattr(process, "pid", 1)

    def getsockopt(self, *_: object) -> bytes:
        return struct.pack("3i", self._pid, os.getuid(), os.getgid())

    def shutdown(self, how: int) -> None:
        pass


class _Transport(asyncio.Transport):
    """One end of a connection."""

    def __init__(
        self, network: Network, process: Process, other: Process, protocol: Any, names: dict[str, Any]
    ) -> None:
        super().__init__({**names, "socket": _Socket(other)})
        self.network, self.process, self.protocol = network, process, protocol
        self.peer: _Transport
        self._is_local = process.host == other.host
        self._coming: deque[tuple[float, str, Any]] = deque()
        self._is_due = False
        self._closing = self._lost = False
        process.at_end.append(self._break)

    # --- what the process does ------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if not self._closing:
            self._send("data", data)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._send("eof")
            self.process.soon(self._end)

    def abort(self) -> None:
        if not self._lost:
            self._break()
            self.process.soon(self._end)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def can_write_eof(self) -> bool:
        return False

    # --- what the network does ------------------------------------------------------------------

    def _break(self) -> None:
        if not self._lost and not self._closing:
            self._closing = True
            self._send("reset")

    def _end(self, error: Exception | None = None) -> None:
        if not self._lost:
            self._lost = self._closing = True
            if self._break in self.process.at_end:
                self.process.at_end.remove(self._break)
            self.protocol.connection_lost(error)

    def _send(self, kind: str, data: Any = None) -> None:
        self.peer.expect(_LOCAL_S if self._is_local else self.network.latency(), kind, data)

    def expect(self, delay: float, kind: str, data: Any = None) -> None:
        """Something is on its way here."""
        loop, coming = self.network.loop, self._coming
        due = loop.time() + delay
        if coming and coming[-1][0] > due:
            due = coming[-1][0]
        coming.append((due, kind, data))
        if not self._is_due:
            self._is_due = True
            loop.call_at(due, self.deliver, context=self.process.context)

    def deliver(self) -> None:
        """What has come by now. Runs in the process."""
        network, coming, parts = self.network, self._coming, list[Any]()
        self._is_due, now = False, network.loop.time()
        if not self._is_local and network.is_cut(self.process.host, self.peer.process.host):
            network.waiting.append(self)
            return
        while coming and coming[0][0] <= now and not self._lost:
            _, kind, part = coming.popleft()
            if kind == "data":
                parts.append(part)
                continue
            self._receive(parts)
            parts = []
            if kind == "made":
                self.protocol.connection_made(self)
            elif kind == "eof":
                if not self.protocol.eof_received():
                    self.close()
            else:
                self._end(ConnectionResetError("the connection was reset"))
        self._receive(parts)
        if self._lost:
            coming.clear()
        elif coming and not self._is_due:
            self._is_due = True
            network.loop.call_at(coming[0][0], self.deliver, context=self.process.context)

    def _receive(self, parts: list[Any]) -> None:
        if parts and not self._closing:
            self.protocol.data_received(parts if self.network.passes else b"".join(parts))


class _Server:
    """What listens."""

    def __init__(self, network: Network, factory: Callable[[], Any], address: Any, process: Process) -> None:
        self._network, self.factory, self.address, self.process = network, factory, address, process

    @property
    def sockets(self) -> list[Any]:
        return [self]

    def getsockname(self) -> Any:
        return self.address

    def close(self) -> None:
        if self._network.servers.get(self.address) is self:
            del self._network.servers[self.address]


class Network:
    """All connections of the cluster.

    Args:
        latency_s: least and most that a message takes from one machine to another.
        passes: whether messages are handed over as objects (`passing.py`).
    """

    def __init__(
        self, loop: SimulatedLoop, rng: random.Random, latency_s: tuple[float, float], *, passes: bool
    ) -> None:
        self.loop, self._rng, self._latency_s, self.passes = loop, rng, latency_s, passes
        self.servers: dict[Any, _Server] = {}
        self.waiting: list[_Transport] = []
        self._connecting: list[asyncio.Future[None]] = []
        self._groups: dict[str, int] = {}
        self._gone: set[str] = set()
        self._ports = _FIRST_PORT
        loop.network = self

    # --- who reaches whom -----------------------------------------------------------------------

    def latency(self) -> float:
        """Of a message from one machine to another."""
        least, most = self._latency_s
        return least + (most - least) * self._rng.random()

    def delay(self, one: str, other: str) -> float:
        return _LOCAL_S if one == other else self.latency()

    def is_cut(self, one: str, other: str) -> bool:
        if one == other:
            return False
        return bool(self._gone & {one, other}) or self._groups.get(one, 0) != self._groups.get(other, 0)

    def vanish(self, host: str) -> None:
        """A machine is gone without a word."""
        self._gone.add(host)

    def come_back(self, host: str) -> None:
        """Another machine has its place; what was sent to the former is lost."""
        self.waiting = [one for one in self.waiting if host not in (one.process.host, one.peer.process.host)]
        self._gone.discard(host)

    def partition(self, groups: dict[str, int]) -> None:
        """Machines reach those of their own group only; those that are not named are of group 0."""
        self._groups = groups
        waiting, self.waiting = self.waiting, []
        for transport in waiting:
            self.loop.call_soon(transport.deliver, context=transport.process.context)
        connecting, self._connecting = self._connecting, []
        for future in connecting:
            if not future.done():
                future.set_result(None)

    # --- connections ----------------------------------------------------------------------------

    def listen(self, factory: Callable[[], Any], address: Any) -> _Server:
        process = PROCESS.get()
        if isinstance(address, tuple):
            host, port = address
            if not port:
                self._ports += 1
                port = self._ports
            address = (host, port)
        if (other := self.servers.get(address)) is not None and other.process.alive:
            raise OSError(f"{address} is in use")
        server = self.servers[address] = _Server(self, factory, address, process)
        return server

    async def connect(self, factory: Callable[[], Any], address: Any) -> tuple[_Transport, Any]:
        process = PROCESS.get()
        host = address[0] if isinstance(address, tuple) else process.host
        await asyncio.sleep(self.delay(process.host, host))
        while self.is_cut(process.host, host):
            future = self.loop.create_future()
            self._connecting.append(future)
            await future
        server = self.servers.get(address)
        if server is None or not server.process.alive:
            raise ConnectionRefusedError(f"nobody listens at {address}")
        self._ports += 1
        own = (process.host, self._ports)
        ours = _Transport(self, process, server.process, factory(), {"sockname": own, "peername": address})
        theirs = _Transport(self, server.process, process, server.factory(), {"sockname": address, "peername": own})
        ours.peer, theirs.peer = theirs, ours
        theirs.expect(self.delay(process.host, host), "made")
        ours.protocol.connection_made(ours)
        return ours, ours.protocol

    def cut(self, process: Process) -> int:
        """Every connection of a process to other machines breaks; returns how many."""
        ends = [end.__self__ for end in process.at_end if isinstance(getattr(end, "__self__", None), _Transport)]
        ends = [end for end in ends if end.peer.process.host != process.host]
        for end in ends:
            end.abort()
        return len(ends)
