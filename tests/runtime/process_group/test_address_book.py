from __future__ import annotations

import threading

import pytest

from hyperpod_ext.runtime.process_group.address_book import AddressBook, LookedUp, NodeAddressBook

A, B, C = ("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.3", 3)


def test_addresses_are_kept_from_one_generation_to_the_next_and_what_is_new_replaces_them() -> None:
    book = AddressBook()
    book.begin(1, 0, {0: A, 1: B})
    book.begin(2, 1, {1: C})
    assert book.known == {0: A, 1: C}
    book.begin(3, 0, {})
    assert book.known == {}


def test_who_has_missed_a_generation_looks_all_up_anew() -> None:
    book = AddressBook()
    book.begin(1, 0, {0: A, 1: B})
    book.begin(4, 3, {1: C})
    assert book.known == {1: C}
    assert book.missing([0, 1]) == [0]


def test_an_address_that_is_not_known_is_looked_up_once_it_is_asked_for() -> None:
    book, asked = AddressBook(), list[int]()
    book.begin(1, 0, {0: A})

    def look_up(rank: int) -> None:
        asked.append(rank)
        threading.Thread(target=book.add, args=(1, {rank: B})).start()

    addresses = LookedUp(book, 2, look_up, lambda: False)
    assert (len(addresses), addresses[0], addresses[1], addresses[1]) == (2, A, B, B)
    assert asked == [1]
    with pytest.raises(IndexError):
        addresses[2]


def test_who_waits_for_an_address_is_freed_when_the_generation_is_over() -> None:
    book, over = AddressBook(), threading.Event()
    book.begin(1, 0, {})

    def end(rank: int) -> None:
        over.set()
        book.add(0, {rank: A})  # of another generation: it comes too late
        threading.Thread(target=book.wake).start()

    addresses = LookedUp(book, 2, end, over.is_set)
    for _ in range(2):
        with pytest.raises(ConnectionError, match="generation 1 is over"):
            addresses[1]


def test_an_agent_asks_once_for_all_ranks_of_a_node_that_its_workers_need() -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []
    book = NodeAddressBook(4, lambda generation, ranks: asked.append((generation, ranks)))
    book.begin(1, 0, {4: A})
    assert book.look_up([4]) == {4: A}
    assert book.look_up([5]) == book.look_up([6]) == {}
    assert asked == [(1, (5, 6, 7))]
    book.add(1, {5: B, 6: C})
    assert book.look_up([4, 5, 6, 9]) == {4: A, 5: B, 6: C}
    assert asked[1:] == [(1, (8, 9, 10, 11))]
    book.begin(2, 0, {})
    assert book.look_up([5]) == {}
    assert asked[2:] == [(2, (4, 5, 6, 7))]
