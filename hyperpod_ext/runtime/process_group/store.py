"""The key-value store of torch's process groups, whose keys are distributed over servers in all ranks.

A key that ends in a rank, such as an address of gloo, is stored on this rank. Any other key is stored on a rank that is
computed from the key's text. There is no TCPStore, and no process that serves all keys and must therefore survive.
Addresses are numeric, so no host name is looked up.
"""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, Store

from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.process_group.address_book import Address as Address
from hyperpod_ext.runtime.process_group.address_book import LookedUp
from hyperpod_ext.runtime.process_group.store_connections import Connections, StoreConnection
from hyperpod_ext.runtime.process_group.store_server import RankServer

_REPEATABLE = frozenset({"set", "get", "check"})
"""Requests that may be sent again after the connection broke, even if the server has already executed the request."""


_TRIES = 3
"""Number of connections to try for a request, because a server may be alive although a connection to it breaks."""


class GenerationOverError(ConnectionError):
    """The generation ended while this process waited in the generation's store."""


class PartitionedStore(Store):
    """The `torch.distributed.Store` of one generation. Thread-safe.

    Args:
        addresses: `(host, port)` of each rank's server, by rank. A `LookedUp` looks up unknown addresses on access.
        generation: number of this store's generation. Keys of other generations are invisible.
        secret: the job's secret.
        own: this rank's number and its server, which is called directly, without a socket.
        connections: connections to other ranks from earlier generations. Without `connections`, the store makes new
            connections, which `close` closes.
    """

    def __init__(
        self,
        addresses: Sequence[Address] | LookedUp,
        generation: int,
        secret: bytes,
        *,
        own: tuple[int, RankServer] | None = None,
        connections: Connections | None = None,
    ) -> None:
        super().__init__()
        self._addresses: Sequence[Address] | LookedUp = addresses
        self._generation, self._secret = generation, secret
        self._own = own
        self._shared = connections is not None
        self._connections = connections or Connections()
        self._connections.enter(addresses.known() if isinstance(addresses, LookedUp) else addresses)
        self._members: dict[str, list[int]] = {}
        self._values: dict[str, str] = {}
        """Values of keys that this process has already read, in base64. Contains only keys that are set once per
        generation."""
        self._busy: set[StoreConnection] = set()
        self._lock = threading.Lock()
        self._over = False
        self._timeout = timedelta(minutes=5)

    def cancel(self) -> None:
        """Make the running calls of all threads fail, and also all later calls."""
        with self._lock:
            self._over = True
            busy = list(self._busy)
        for line in busy:
            with contextlib.suppress(OSError):  # the peer has closed the connection
                line.socket.shutdown(socket.SHUT_RDWR)
        if self._own is not None:
            self._own[1].enter(self._generation + 1)

    def close(self) -> None:
        """Close the connections, unless later generations will use them. Must not be called while another call runs."""
        if not self._shared:
            self._connections.close()

    def route(self, group_name: str, ranks: Sequence[int]) -> None:
        """Route the keys of group `group_name`, which end in an index into `ranks` instead of a rank.

        All members of the group must call `route`."""
        # skip the thousands of groups of a device mesh that do not contain this rank
        if self._own is None or self._own[0] in ranks:
            self._members[group_name] = list(ranks)

    # methods of torch's class Store

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def generation(self) -> int:
        return self._generation

    def set(self, key: str, value: bytes | str) -> None:
        self._call(key, {"op": "set", "value": _text(value)})

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        request = {"op": "compare_set", "expected": _text(expected_value), "value": _text(desired_value)}
        return base64.b64decode(self._call(key, request)["value"])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def get(self, key: str) -> bytes:
        return base64.b64decode(self._wait(key, self._timeout))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._wait(key, timeout or self._timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._call(key, {"op": "check"})["found"] for key in keys)

    def add(self, key: str, amount: int) -> int:
        return int(self._call(key, {"op": "add", "amount": amount})["value"])

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> PartitionedStore:
        copy = PartitionedStore(
            self._addresses, self._generation, self._secret, own=self._own, connections=self._connections
        )
        copy._members = self._members
        return copy

    def _wait(self, key: str, timeout: timedelta) -> str:
        """Wait until `key` is set, and return its value in base64."""
        self._check_not_over()
        if (value := self._values.get(key) or self._pushed(key)) is None:
            request: wire.Message = {"op": "get", "timeout": timeout.total_seconds()}
            if not is_set_once(key):
                return str(self._call(key, request)["value"])
            value = str(self._call(key, request | {"watch": True})["value"])
        self._values[key] = value
        return value

    def _pushed(self, key: str) -> str | None:
        """Return the value of `key` if the rank that stores `key` has pushed the value. Pushes save requests, because
        most keys are the same in each generation."""
        if (line := self._connections.take_watching(key)) is None:
            return None
        try:
            value = line.pushed(key, self._generation)
        except OSError:  # the connection broke while it was idle
            line.socket.close()
            return None
        self._connections.put(line)
        return value

    def _call(self, key: str, request: wire.Message) -> wire.Message:
        owner = owner_of(key, len(self._addresses), self._members)
        request = {**request, "key": key, "generation": self._generation}
        self._check_not_over()
        answer = self._ask_own(request) if self._own and owner == self._own[0] else self._ask(owner, request)
        if "error" in answer:
            raise GenerationOverError(f"store: {answer['error']}")
        return answer

    def _check_not_over(self) -> None:
        if self._over:
            raise GenerationOverError(f"generation {self._generation} is over")

    def _ask_own(self, request: wire.Message) -> wire.Message:
        assert self._own is not None
        timeout_s = request.get("timeout", 0) + 10.0  # the server itself answers after the request's timeout
        answer = self._own[1].ask(request, timeout_s)
        return {"error": "this rank's own server does not answer"} if answer is None else answer

    def _ask(self, owner: int, request: wire.Message) -> wire.Message:
        try:
            address = self._addresses[owner]
        except ConnectionError as error:
            raise GenerationOverError(str(error)) from error
        line = self._connections.take(address)
        for _ in range(_TRIES - 1):
            try:
                if line is not None and not line.has_ended():
                    return self._ask_on(line, request)
                return wire.again_while_busy(lambda: self._ask_anew(address, request))
            except (GenerationOverError, ConnectionRefusedError, wire.RefusedError):
                raise
            except ConnectionError:
                if request["op"] not in _REPEATABLE:
                    raise
            line = None
        return wire.again_while_busy(lambda: self._ask_anew(address, request))

    def _ask_anew(self, address: Address, request: wire.Message) -> wire.Message:
        return self._ask_on(StoreConnection(address), request, connect=True)

    def _ask_on(self, line: StoreConnection, request: wire.Message, *, connect: bool = False) -> wire.Message:
        with self._in_use(line):
            if connect:
                line.connect(self._secret)
            answer = line.ask(request)
        self._connections.put(line, str(request["key"]) if "watch" in request else "")
        return answer

    @contextlib.contextmanager
    def _in_use(self, line: StoreConnection) -> Iterator[None]:
        """Register the connection `line` inside the `with` block, so that `cancel` can end the call. Closes the
        connection if the call fails."""
        with self._lock:
            if self._over:
                line.socket.close()
                raise GenerationOverError(f"generation {self._generation} is over")
            self._busy.add(line)
        try:
            yield
        except OSError as error:
            line.socket.close()
            if self._over:
                raise GenerationOverError(f"generation {self._generation} is over") from error
            raise
        finally:
            with self._lock:
                self._busy.discard(line)


def _text(value: bytes | str) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else bytes(value)).decode()


class LastingStore(Store):
    """The store that kept groups use in all generations. Passes each call on to the store of the present generation."""

    def __init__(self) -> None:
        super().__init__()
        self._now: Any = HashStore()
        """Store of the present generation. The type is Any, because torch's types lack `timeout`, and do not declare
        that values are bytes."""

    def become(self, store: Store) -> None:
        self._now = store

    # methods of torch's class Store

    @property
    def timeout(self) -> timedelta:
        found: timedelta = self._now.timeout
        return found

    def set_timeout(self, timeout: timedelta) -> None:
        self._now.set_timeout(timeout)

    def set(self, key: str, value: bytes | str) -> None:
        self._now.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._now.get(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._now.wait(list(keys), timeout or self._now.timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._now.check(list(keys)))

    def add(self, key: str, amount: int) -> int:
        return int(self._now.add(key, amount))

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        return bytes(self._now.compare_set(key, expected_value, desired_value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> LastingStore:
        return self


def owner_of(key: str, world_size: int, members: dict[str, list[int]] | None = None) -> int:
    """Return the rank that stores `key`: the rank at the key's end, or else a rank that is computed from the key.

    `members`: by group name, the ranks of each group whose keys end in an index into these ranks.
    """
    prefix, _, last = key.rpartition("/")
    if last.isdecimal() and int(last) < world_size:
        ranks = (members or {}).get(_group_in(prefix.split("/")))
        return int(last) if ranks is None else ranks[int(last)]
    return zlib.crc32(key.encode()) % world_size


def is_set_once(key: str) -> bool:
    """Return whether torch sets `key` only once in a generation, as the key of a rank's address in a group."""
    parts = key.split("/")  # .../{group}//{device}//{number}/{rank}
    return len(parts) >= 6 and parts[-1].isdecimal() and parts[-3] == parts[-5] == ""


def _group_in(prefix: Sequence[str]) -> str:
    """Return the group's name from a prefix of gloo's keys; empty if the prefix contains no group's name.

    Prefixes are .../{group}//{device}//{number} and .../{group}//{device}//reconfigure/{uuid}/{number}."""
    place = -7 if len(prefix) >= 7 and prefix[-3] == "reconfigure" else -5
    return prefix[place] if len(prefix) >= -place else ""


class Endpoint:
    """This rank's part of the job's store during the life of the process: its server and connections.

    Args:
        rank: number of this rank.
        secret: the job's secret.
        on_error: function that is called with the error if an error ends the server's thread.
        host: address at which to listen; empty for all addresses of this machine.
    """

    def __init__(self, rank: int, secret: bytes, on_error: Callable[[str], None], host: str = "") -> None:
        self.rank, self._secret = rank, secret
        self._server = RankServer(secret, on_error)
        self._connections = Connections()
        self.port = self._server.start(host)
        """Port on which this rank's server listens."""

    @property
    def requests(self) -> int:
        """Number of requests that this rank's server has executed, including requests of its own rank."""
        return self._server.requests

    def open(self, addresses: Sequence[Address] | LookedUp, generation: int) -> PartitionedStore:
        """Return the store of a generation. Drops keys of earlier generations, and makes waits for them fail."""
        self._server.enter(generation)
        own = (self.rank, self._server)
        return PartitionedStore(addresses, generation, self._secret, own=own, connections=self._connections)

    def close(self) -> None:
        """Close the server and the connections."""
        self._connections.close()
        self._server.close()


def rehearse() -> None:
    """Connect two endpoints in this process once, before the process forks workers.

    Processes that are forked later need not repeat work that is done once per process, such as looking up ciphers and
    specializing bytecode, and copy less memory.
    """
    errors: list[str] = []
    secret = b"rehearsal"
    ends = [Endpoint(rank, secret, errors.append) for rank in range(2)]
    addresses = [("127.0.0.1", end.port) for end in ends]
    try:
        with contextlib.suppress(OSError):  # the machine may have no loopback interface
            first, second = (end.open(addresses, 1) for end in ends)
            first.set("0", b"")
            second.get("0")
            second.cancel()
    finally:
        for end in ends:
            end.close()
    if errors:
        raise RuntimeError(errors[0])
