"""The keys and values of one rank's server, with waiting requests and watching clients. This module does no I/O
except reading the clock.

A client that gets a key may also watch the key, so that the server pushes the key's value to the client in each later
generation. A rank connects to the same ranks in each generation, so it gets most addresses without further requests.
"""

from __future__ import annotations

import base64
import heapq
import itertools
import time
from collections.abc import Callable, Collection, Hashable
from typing import Generic, TypeVar

from hyperpod_ext.runtime.ipc import messages as wire

Reply = Callable[[wire.Message], None]
Client = TypeVar("Client", bound=Hashable)


class StoreKeys(Generic[Client]):
    """The keys of all generations that are not over, with waiting requests and watching clients. Not thread-safe.

    Args:
        push: function that sends the value of a key to clients that watch the key.
    """

    def __init__(self, push: Callable[[Collection[Client], wire.Message], None]) -> None:
        self.generation = 0
        self._push = push
        self._values: dict[tuple[int, str], str] = {}
        self._waiting: dict[tuple[int, str], dict[int, tuple[Reply, Client | None]]] = {}
        self._watched: dict[str, set[Client]] = {}
        """The clients that watch each key, in all generations."""
        self._deadlines: list[tuple[float, int, tuple[int, str]]] = []
        self._tickets = itertools.count()

    def answer(self, request: wire.Message, reply: Reply, client: Client | None = None) -> None:
        """Execute `request`, and call `reply` with the answer. If `request` gets a key that is not set yet, calls
        `reply` later.

        Args:
            client: the client that sent the request. `client` is None for a request that cannot watch its key.
        """
        key = (int(request["generation"]), str(request["key"]))
        if key[0] < self.generation:
            reply(self._over(key))
            return
        match request.get("op"):
            case "set":
                self._set(key, str(request["value"]))
                reply({})
            case "get":
                if client is not None and request.get("watch") is True:
                    self._watched.setdefault(key[1], set()).add(client)
                self._get(key, float(request["timeout"]), reply, client)
            case "compare_set":
                reply({"value": self._compare_set(key, str(request["expected"]), str(request["value"]))})
            case "check":
                reply({"found": key in self._values})
            case "add":
                total = int(base64.b64decode(self._values.get(key, "")) or 0) + int(request["amount"])
                self._set(key, base64.b64encode(str(total).encode()).decode())
                reply({"value": total})
            case op:
                reply({"error": f"unknown op {op!r}"})

    def _set(self, key: tuple[int, str], value: str) -> None:
        self._values[key] = value
        waiting = self._waiting.pop(key, {}).values()
        for reply, _ in waiting:
            reply({"value": value})
        if others := self._watched.get(key[1], set()).difference(client for _, client in waiting):
            self._push(others, {"key": key[1], "generation": key[0], "value": value})

    def _compare_set(self, key: tuple[int, str], expected: str, value: str) -> str:
        """Set a key if it has the value `expected`, where "" means that the key is not set. Returns the key's value
        after the call."""
        now = self._values.get(key, "")
        if now == expected:
            self._set(key, value)
            return value
        return now or expected  # like torch's stores, return `expected` for a missing key

    def _get(self, key: tuple[int, str], timeout_s: float, reply: Reply, client: Client | None) -> None:
        if key in self._values:
            reply({"value": self._values[key]})
            return
        ticket = next(self._tickets)
        self._waiting.setdefault(key, {})[ticket] = reply, client
        heapq.heappush(self._deadlines, (time.monotonic() + timeout_s, ticket, key))

    def enter(self, generation: int) -> None:
        """Drop the keys of older generations, and make waits for these keys fail. Watches of keys that were set in the
        last generation stay."""
        if generation > self.generation and self._values:
            names = {name for _, name in self._values}
            self._watched = {name: clients for name, clients in self._watched.items() if name in names}
        self.generation = max(self.generation, generation)
        self._values = {key: value for key, value in self._values.items() if key[0] >= self.generation}
        for key in [key for key in self._waiting if key[0] < self.generation]:
            for reply, _ in self._waiting.pop(key).values():
                reply(self._over(key))

    def forget(self, client: Client) -> None:
        """Drop the watches of a client whose connection has closed."""
        for clients in self._watched.values():
            clients.discard(client)

    def expire(self) -> float | None:
        """Answer the waiting requests whose timeout has passed. Returns the seconds until the next timeout; None if no
        request waits."""
        while self._deadlines:
            deadline, ticket, key = self._deadlines[0]
            waiter = self._waiting.get(key, {}).get(ticket)
            if waiter is not None:
                if (left := deadline - time.monotonic()) > 0:
                    return left
                del self._waiting[key][ticket]
                waiter[0]({"error": f"no rank has set {key[1]!r} in time"})
            heapq.heappop(self._deadlines)
        return None

    def _over(self, key: tuple[int, str]) -> wire.Message:
        return {"error": f"generation {key[0]} is over; the job is in generation {self.generation}"}
