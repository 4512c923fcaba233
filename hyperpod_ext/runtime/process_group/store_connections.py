"""Connections to the key-value servers of other ranks, kept from generation to generation."""

from __future__ import annotations

import socket
import threading
from collections.abc import Collection

from hyperpod_ext.ports import family_of
from hyperpod_ext.runtime.ipc import messages as wire
from hyperpod_ext.runtime.ipc.connections import breaking
from hyperpod_ext.runtime.process_group.address_book import Address

_CONNECT_S = 30.0
_READ_BYTES, _LOOK_BYTES = 1 << 16, 1 << 12


class StoreConnection:
    """A connection to another rank's server. Only one thread may use a connection at a time."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.socket = socket.socket(family_of(address[0]))
        self._received = bytearray()
        self._generation = 0
        self._values: dict[str, str] = {}
        """Pushed values of watched keys, in base64, from the newest generation of which values have arrived."""

    def connect(self, secret: bytes) -> None:
        """Connect to the server. Both sides prove that they have the job's secret."""
        with breaking(connects=True):
            self.socket.settimeout(_CONNECT_S)
            self.socket.connect(self.address)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.join_peer_blocking(self.socket, secret)
            self.socket.settimeout(None)

    def has_ended(self) -> bool:
        """Return whether the server has closed the idle connection."""
        try:
            return not self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def ask(self, request: wire.Message) -> wire.Message:
        with breaking():
            self.socket.sendall(wire.encode(request))
        answer = self._receive()
        assert answer is not None, "a socket that blocks has an answer, or ends"
        return answer

    def pushed(self, key: str, generation: int) -> str | None:
        """Return the pushed value of a watched key; None if the server has not pushed it in this generation."""
        if (generation != self._generation or key not in self._values) and self._receive(socket.MSG_DONTWAIT):
            raise wire.WireError("the server has sent an answer without a request")
        return self._values.get(key) if generation == self._generation else None

    def _receive(self, flags: int = 0) -> wire.Message | None:
        """Return the next answer, and record pushed values that arrive before it. Returns None if no answer has arrived
        yet."""
        while True:
            for message in wire.frames(self._received):
                if "key" not in message:
                    return message
                self._record(message)
            with breaking():
                try:
                    data = self.socket.recv(_LOOK_BYTES if flags else _READ_BYTES, flags)
                except BlockingIOError:
                    if not flags:
                        raise
                    return None
            if not data:
                raise ConnectionResetError("the server closed")
            self._received += data

    def _record(self, update: wire.Message) -> None:
        try:
            key, value, generation = str(update["key"]), str(update["value"]), int(update["generation"])
        except (KeyError, TypeError, ValueError) as error:
            raise wire.WireError(f"the server sent a key without its value or generation: {error!r}") from error
        if generation > self._generation:
            self._generation, self._values = generation, {}
        if generation == self._generation:
            self._values[key] = value


class Connections:
    """This rank's connections to the servers of other ranks, kept from generation to generation."""

    def __init__(self) -> None:
        self._idle: dict[Address, list[StoreConnection]] = {}
        self._watched: dict[str, StoreConnection] = {}
        """For each watched key, the connection on which the server pushes the key's value in later generations."""
        self._used: set[str] = set()
        """Watched keys that were used in this generation. The next generation drops watches of all other keys."""
        self._lock = threading.Lock()

    def take(self, address: Address) -> StoreConnection | None:
        """Return an idle connection to `address`, which may be broken; None if there is no idle connection."""
        with self._lock:
            idle = self._idle.get(address)
            return idle.pop() if idle else None

    def take_watching(self, key: str) -> StoreConnection | None:
        """Return the connection on which the value of `key` is pushed. Returns None if no connection is watching, or if
        another thread is using the connection."""
        with self._lock:
            line = self._watched.get(key)
            if line is None or line not in (idle := self._idle.get(line.address, [])):
                return None
            self._used.add(key)
            idle.remove(line)
            return line

    def put(self, line: StoreConnection, watching: str = "") -> None:
        """Make the connection `line` idle after its last answer. `watching`: key whose value the server will push on
        this connection from now on."""
        with self._lock:
            self._idle.setdefault(line.address, []).append(line)
            if watching:
                self._watched[watching] = line
                self._used.add(watching)

    def enter(self, addresses: Collection[Address]) -> None:
        """Begin a generation: close connections to servers that are not in `addresses`, and drop unused watches."""
        with self._lock:
            for gone in self._idle.keys() - set(addresses):
                for line in self._idle.pop(gone):
                    line.socket.close()
            self._watched = {key: line for key, line in self._watched.items() if key in self._used}
            self._used = set()

    def close(self) -> None:
        self.enter(())
