"""Where ranks serve their keys: what is known of it, kept from one generation to the next, and the rest looked up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping

Address = tuple[str, int]


class AddressBook:
    """Addresses of one job's ranks, as one process knows them. Safe from any thread."""

    def __init__(self) -> None:
        self.known: dict[int, Address] = {}
        self.generation = 0
        """Whose addresses they are."""
        self._changed = threading.Condition()

    def begin(self, generation: int, follows: int, addresses: Mapping[int, Address]) -> None:
        """A generation begins. `addresses` add to those of generation `follows`; 0: none of before count.

        Who has not followed that generation knows too little of what has changed, and looks up all others anew.
        """
        with self._changed:
            if follows == 0 or follows != self.generation:
                self.known.clear()
            self.generation = generation
            self.known.update(addresses)
            self._changed.notify_all()

    def add(self, generation: int, addresses: Mapping[int, Address]) -> None:
        """The answer to a look-up; one of another generation comes too late."""
        with self._changed:
            if generation == self.generation:
                self.known.update(addresses)
                self._changed.notify_all()

    def missing(self, ranks: Iterable[int]) -> list[int]:
        """Those of `ranks` that are to be looked up."""
        return sorted(set(ranks) - self.known.keys())

    def wake(self) -> None:
        """Have those who wait look whether it is of use still."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, rank: int, generation: int, is_over: Callable[[], bool]) -> Address | None:
        """The address of `rank`, once it is known; None when `is_over`, or another generation has begun."""
        with self._changed:
            self._changed.wait_for(lambda: rank in self.known or is_over() or self.generation != generation)
            return None if self.generation != generation else self.known.get(rank)


class NodeAddressBook(AddressBook):
    """As a node's agent has it, for all workers there.

    Args:
        workers_per_node: so many ranks in a row are on one node.
        ask: asks the coordinator for addresses of a generation's ranks, which are added some time later.
    """

    def __init__(self, workers_per_node: int, ask: Callable[[int, tuple[int, ...]], None]) -> None:
        super().__init__()
        self._workers_per_node, self._ask = workers_per_node, ask
        self._asked: set[int] = set()

    def begin(self, generation: int, follows: int, addresses: Mapping[int, Address]) -> None:
        super().begin(generation, follows, addresses)
        self._asked.clear()

    def look_up(self, ranks: Iterable[int]) -> dict[int, Address]:
        """Those of `ranks` that are known. Others are asked for once, with all ranks of their nodes: where one worker
        needs a rank of another node, its neighbours need others there."""
        ranks = set(ranks)
        firsts = {rank - rank % self._workers_per_node for rank in self.missing(ranks)}
        wanted = {first + local for first in firsts for local in range(self._workers_per_node)}
        if missing := set(self.missing(wanted)) - self._asked:
            self._asked |= missing
            self._ask(self.generation, tuple(sorted(missing)))
        return {rank: self.known[rank] for rank in ranks if rank in self.known}


class LookedUp:
    """Addresses of all ranks of one generation, by rank; one that is not known is looked up when it is asked for.

    Args:
        look_up: asks for the address of a rank, which the book is given some time later.
        is_over: whether the generation is over.
    """

    def __init__(
        self, book: AddressBook, world_size: int, look_up: Callable[[int], None], is_over: Callable[[], bool]
    ) -> None:
        self._book, self._world_size, self._look_up, self._is_over = book, world_size, look_up, is_over
        self._generation = book.generation

    def __len__(self) -> int:
        return self._world_size

    def __getitem__(self, rank: int) -> Address:
        """Where `rank` serves its keys.

        Raises:
            IndexError: there is no such rank.
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
        """Those that need not be looked up."""
        return list(self._book.known.values())
