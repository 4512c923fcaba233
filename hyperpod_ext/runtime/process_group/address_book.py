"""Addresses of the ranks' key-value servers, which are kept from generation to generation, and looked up on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping

Address = tuple[str, int]


class AddressBook:
    """The addresses of ranks that this process knows. Thread-safe."""

    def __init__(self) -> None:
        self.known: dict[int, Address] = {}
        self.generation = 0
        """Generation to which the known addresses belong."""
        self._changed = threading.Condition()

    def begin(self, generation: int, follows: int, addresses: Mapping[int, Address]) -> None:
        """Begin a generation. Adds `addresses` to the addresses of generation `follows`.

        If `follows` is 0, drops all earlier addresses.

        A process that has missed generation `follows` also drops its addresses, and looks up addresses when needed.
        """
        with self._changed:
            if follows == 0 or follows != self.generation:
                self.known.clear()
            self.generation = generation
            self.known.update(addresses)
            self._changed.notify_all()

    def add(self, generation: int, addresses: Mapping[int, Address]) -> None:
        """Add the addresses that a look-up has found. Ignores addresses of another generation."""
        with self._changed:
            if generation == self.generation:
                self.known.update(addresses)
                self._changed.notify_all()

    def missing(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks in `ranks` whose addresses are unknown."""
        return sorted(set(ranks) - self.known.keys())

    def wake(self) -> None:
        """Wake the threads that wait in `wait_for`, so that they call `is_over` again."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, rank: int, generation: int, is_over: Callable[[], bool]) -> Address | None:
        """Wait until the address of `rank` is known, and return the address. Returns None if `is_over` returns true or
        another generation has begun."""
        with self._changed:
            self._changed.wait_for(lambda: rank in self.known or is_over() or self.generation != generation)
            return None if self.generation != generation else self.known.get(rank)


class NodeAddressBook(AddressBook):
    """The address book of a node's agent, which answers the look-ups of the node's workers.

    Args:
        workers_per_node: number of ranks on a node; the ranks of a node are consecutive.
        ask: requests addresses of a generation's ranks from the coordinator, which later answers with a call of `add`.
    """

    def __init__(self, workers_per_node: int, ask: Callable[[int, tuple[int, ...]], None]) -> None:
        super().__init__()
        self._workers_per_node, self._ask = workers_per_node, ask
        self._asked: set[int] = set()

    def begin(self, generation: int, follows: int, addresses: Mapping[int, Address]) -> None:
        super().begin(generation, follows, addresses)
        self._asked.clear()

    def look_up(self, ranks: Iterable[int]) -> dict[int, Address]:
        """Return the known addresses of `ranks`. Requests each unknown address once, together with the addresses of all
        ranks on the same node.

        Workers of one node mostly need addresses of different ranks on the same other node, so one request is enough.
        """
        ranks = set(ranks)
        firsts = {rank - rank % self._workers_per_node for rank in self.missing(ranks)}
        wanted = {first + local for first in firsts for local in range(self._workers_per_node)}
        if missing := set(self.missing(wanted)) - self._asked:
            self._asked |= missing
            self._ask(self.generation, tuple(sorted(missing)))
        return {rank: self.known[rank] for rank in ranks if rank in self.known}


class LookedUp:
    """The addresses of all ranks of one generation, by rank. An unknown address is looked up when it is accessed.

    Args:
        look_up: requests the address of a rank, which is added to the address book later.
        is_over: returns whether the generation is over.
    """

    def __init__(
        self, book: AddressBook, world_size: int, look_up: Callable[[int], None], is_over: Callable[[], bool]
    ) -> None:
        self._book, self._world_size, self._look_up, self._is_over = book, world_size, look_up, is_over
        self._generation = book.generation

    def __len__(self) -> int:
        return self._world_size

    def __getitem__(self, rank: int) -> Address:
        """Return the address of the rank's key-value server. Looks up an unknown address, and waits for the answer.

        Raises:
            IndexError: the rank does not exist.
            ConnectionError: the generation is over.
        """
        if not 0 <= rank < self._world_size:
            raise IndexError(rank)
        if self._book.generation == self._generation and (known := self._book.known.get(rank)) is not None:
            return known
        if self._is_over():
            raise ConnectionError(f"generation {self._generation} is over")
        self._look_up(rank)
        found = self._book.wait_for(rank, self._generation, self._is_over)
        if found is None:
            raise ConnectionError(f"generation {self._generation} is over")
        return found

    def known(self) -> Collection[Address]:
        """Return the addresses that are known without a look-up."""
        return list(self._book.known.values())
