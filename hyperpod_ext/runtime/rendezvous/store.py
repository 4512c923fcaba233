"""The store that torch's process groups meet in, spread over the nodes' key-value servers.

A key that ends in a rank (gloo's addresses do) belongs to that rank's node; any other to one computed
from its text. There is no TCPStore, no process that hosts everything, and no DNS look-up.
"""

from __future__ import annotations

import base64
import socket
import threading
import zlib
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from hyperpod_ext.runtime import wire


class GenerationOverError(ConnectionError):
    """The generation ended while this process waited in its store."""


class PartitionedStore(Store):
    """`torch.distributed.Store` of one generation.

    Args:
        addresses: `(host, port)` of each rank's node's server, by rank.
        generation: keys of other generations are invisible.
        secret: the job's.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], generation: int, secret: bytes) -> None:
        super().__init__()
        self._addresses, self._generation, self._secret = list(addresses), generation, secret
        self._connections: dict[tuple[str, int], socket.socket] = {}
        self._lock = threading.Lock()
        self._over = False
        self._timeout = timedelta(minutes=5)

    def cancel(self) -> None:
        """Fail the call in progress, in whatever thread, and all later ones."""
        self._over = True
        for connection in list(self._connections.values()):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # already closed by the other side

    def close(self) -> None:
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    # the names below are torch's

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._call(key, {"op": "set", "value": base64.b64encode(data).decode()})

    def get(self, key: str) -> bytes:
        answer = self._call(key, {"op": "get", "timeout": self._timeout.total_seconds()})
        return base64.b64decode(answer["value"])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._call(key, {"op": "get", "timeout": (timeout or self._timeout).total_seconds()})

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._call(key, {"op": "check"})["found"] for key in keys)

    def add(self, key: str, amount: int) -> int:
        return int(self._call(key, {"op": "add", "amount": amount})["value"])

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> PartitionedStore:
        return PartitionedStore(self._addresses, self._generation, self._secret)

    def _call(self, key: str, request: wire.Message) -> wire.Message:
        with self._lock:
            if self._over:
                raise GenerationOverError(f"generation {self._generation} is over")
            try:
                connection = self._connect(self._addresses[owner_of(key, len(self._addresses))])
                wire.send(connection, {**request, "key": key, "generation": self._generation})
                answer = wire.receive(connection)
            except OSError as error:
                if self._over:
                    raise GenerationOverError(f"generation {self._generation} is over") from error
                raise
        if answer is None or "error" in answer:
            raise GenerationOverError(f"store: {answer['error'] if answer else 'the server closed'}")
        return answer

    def _connect(self, address: tuple[str, int]) -> socket.socket:
        if address not in self._connections:
            connection = socket.create_connection(address, timeout=30)
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.join_peer_blocking(connection, self._secret)
            self._connections[address] = connection
        return self._connections[address]


def owner_of(key: str, world_size: int) -> int:
    """Rank whose node keeps `key`: the rank the key ends in, else one computed from its text."""
    last = key.rpartition("/")[2]
    if last.isdecimal() and int(last) < world_size:
        return int(last)
    return zlib.crc32(key.encode()) % world_size
