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
