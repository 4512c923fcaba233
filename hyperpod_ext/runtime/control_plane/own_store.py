"""The key-value server of this rank, and the store of each generation, which spans the servers of all ranks."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence

from hyperpod_ext.errors import ConflictError, UnreachableError
from hyperpod_ext.runtime.process_group.store import Address, GenerationOverError, PartitionedStore
from hyperpod_ext.runtime.process_group.store_connections import Connections
from hyperpod_ext.runtime.process_group.store_server import RankServer

_RETRY_S = 0.05


class OwnStore:
    """The key-value server of this process. When the process dies, other ranks notice that their connections break."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._server = RankServer(secret, _end)
        self._connections = Connections()
        self.address: Address | None = None

    def start(self, host: str, port: int = 0) -> Address:
        """Listen on `port` of `host`, a numeric address. Port 0 selects any free port. Returns (host, port).

        Raises:
            ConflictError: the port is used, or this process may not use it.
        """
        if self.address is None:
            try:
                self.address = host, self._server.start(host, port)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
                    raise
                raise ConflictError(
                    f"cannot listen on {host}:{port} for the other ranks: {error.strerror}",
                    hint="Each rank listens on HPX_PORT_BASE + its local rank; set HPX_PORT_BASE, the same on every "
                    "node, so that these ports are free and reachable.",
                ) from error
        return self.address

    def store(self, addresses: Sequence[Address], number: int, rank: int) -> PartitionedStore:
        """Return the store of generation `number`, and delete the keys of older generations from this rank's server."""
        self._server.enter(number)
        own = (rank, self._server)
        return PartitionedStore(addresses, number, self._secret, own=own, connections=self._connections)


def wait_listening(rank: int, address: Address, is_over: Callable[[], bool], limit_s: float) -> None:
    """Wait until the server of `rank` listens at `address`. The rank may still be starting.

    Raises:
        GenerationOverError: `is_over` returned true before the server listened.
        UnreachableError: no process listens at `address` within `limit_s` seconds.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection(address, timeout=max(1.0, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if is_over():
                raise GenerationOverError("the generation is over") from error
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"rank {rank} does not listen at {address[0]}:{address[1]}: {error}",
                    hint="Ranks must reach each other's ports from HPX_PORT_BASE on.",
                ) from error
        time.sleep(_RETRY_S)


def listens(address: Address) -> bool:
    """Return whether a process listens at `address`."""
    try:
        socket.create_connection(address, timeout=1.0).close()
    except OSError:
        return False
    return True


def _end(why: str) -> None:
    """End this process, so that its launcher replaces it. If the process continued, other ranks would wait forever for
    its failed key-value server."""
    sys.stderr.write(f"{why}\n")
    os._exit(1)
