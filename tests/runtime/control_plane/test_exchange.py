"""All ranks say something and are answered alike, and none of them hears more than a few others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hyperpod_ext.errors import ConflictError
from hyperpod_ext.runtime.control_plane.exchange import FAN_OUT, Exchange, children_of, levels_below, parent_of, spread
from hyperpod_ext.runtime.process_group.store import Endpoint, GenerationOverError, PartitionedStore

SECRET = b"0123456789abcdef"


class Ranks:
    """So many, each with its own server, in one process."""

    def __init__(self, count: int) -> None:
        self.errors: list[str] = []
        self.servers = [Endpoint(rank, SECRET, self.errors.append) for rank in range(count)]
        addresses = [("127.0.0.1", each.port) for each in self.servers]
        self.stores: list[PartitionedStore] = [each.open(addresses, 1) for each in self.servers]

    def exchange(self, rank: int, timeout_s: float = 60.0) -> Exchange:
        return Exchange(self.stores[rank], rank, len(self.servers), timeout_s)

    def each(self, ask: Callable[[int], Any], but: Sequence[int] = ()) -> list[Any]:
        """What came of `ask` on each rank but some: what it returned, or the error."""

        def one(rank: int) -> Any:
            try:
                return ask(rank)
            except Exception as error:
                return error

        asking = [rank for rank in range(len(self.servers)) if rank not in but]
        with ThreadPoolExecutor(len(asking)) as pool:
            return list(pool.map(one, asking))

    def close(self) -> None:
        for store in self.stores:
            store.cancel()
        for each in self.servers:
            each.close()
        assert self.errors == []


@pytest.fixture
def ranks() -> Iterator[Callable[[int], Ranks]]:
    made: list[Ranks] = []

    def make(count: int) -> Ranks:
        made.append(Ranks(count))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("count", [1, 2, FAN_OUT + 1, FAN_OUT + 2, 60])
def test_rank_0_hears_all_and_all_are_answered(ranks, count):
    job, heard = ranks(count), []

    def decide(values: Sequence[Any]) -> Any:
        heard.append(values)
        return sum(values)

    assert (
        job.each(lambda rank: job.exchange(rank).ask("number", rank * rank, decide))
        == [sum(rank * rank for rank in range(count))] * count
    )
    assert heard == [[rank * rank for rank in range(count)]]


def test_no_rank_serves_more_than_a_few_whatever_their_number(ranks):
    job = ranks(FAN_OUT * 6)
    job.each(lambda rank: job.exchange(rank).ask("number", rank, sum))
    # of each child a report, which is waited for and read; its own answer likewise
    assert max(each.requests for each in job.servers) <= 3 * FAN_OUT + 3
    assert {rank: parent_of(rank) for rank in (0, 1, FAN_OUT, FAN_OUT + 1)} == {0: 0, 1: 0, FAN_OUT: 0, FAN_OUT + 1: 1}
    assert [levels_below(0, count) for count in (1, 2, 17, 18, 273, 274, 8192)] == [0, 1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("count", [1, 17, 18, 100, 300])
def test_each_rank_but_rank_0_is_heard_by_its_parent_alone(count):
    heard = [(child, rank) for rank in range(count) for child in children_of(rank, count)]
    assert sorted(heard) == [(rank, parent_of(rank)) for rank in range(1, count)]


def test_what_rank_0_decides_may_be_that_nothing_goes_on(ranks):
    job = ranks(FAN_OUT + 4)

    def refuse(_: Sequence[Any]) -> Any:
        raise ConflictError("two jobs of one name", hint="Choose another.")

    for error in job.each(lambda rank: job.exchange(rank).ask("join", rank, refuse)):
        assert isinstance(error, ConflictError)
        assert (error.message, error.hint) == ("two jobs of one name", "Choose another.")


@pytest.mark.parametrize("missing", [3, FAN_OUT + 3])
def test_all_are_told_who_has_not_spoken(ranks, missing):
    """One that rank 0 hears itself, and one that another hears for it."""
    job, decided = ranks(FAN_OUT + 6), []
    errors = job.each(lambda rank: job.exchange(rank, 0.2).ask("join", rank, decided.append), but=[missing])
    assert decided == []
    for error in errors:
        assert isinstance(error, GenerationOverError)
        assert str(error).startswith(f"rank {missing} has not answered in time: "), error


def test_a_report_of_another_version_is_named_on_all(ranks):
    job, decided = ranks(4), []

    def ask(rank: int) -> Any:
        if rank == 2:
            job.stores[2].set("hpx-join-from-2/0", '["what an earlier version says"]')
            return None
        return job.exchange(rank).ask("join", rank, decided.append)

    found = job.each(ask)
    assert decided == []
    for rank in (0, 1, 3):
        assert isinstance(found[rank], GenerationOverError)
        assert str(found[rank]).startswith("rank 2 sent an invalid report; does it run another version"), found[rank]


def test_one_that_is_gone_keeps_the_answer_from_nobody_but_those_below_it(ranks):
    job = ranks(FAN_OUT + 1)
    spoken = threading.Barrier(2)

    def decide(values: Sequence[Any]) -> Any:
        spoken.wait()  # rank 1 has said its word, and goes
        job.servers[1].close()
        return sum(values)

    def ask(rank: int) -> Any:
        if rank == 1:
            job.stores[1].set(f"hpx-number-from-1/{parent_of(1)}", '{"values": {"1": 1}, "missing": {}}')
            spoken.wait()
            return None
        return job.exchange(rank).ask("number", rank, decide)

    found = job.each(ask)
    assert isinstance(found[0], ConnectionError)
    assert found[1:] == [None, *[sum(range(FAN_OUT + 1))] * (FAN_OUT - 1)]


def test_who_waits_is_free_when_the_generation_is_over(ranks):
    job = ranks(FAN_OUT + 6)
    asked = threading.Semaphore(0)

    def ask(rank: int) -> Any:
        if rank == 5:
            for _ in range(FAN_OUT + 5):
                asked.acquire()
            for store in job.stores:
                store.cancel()
            return None
        asked.release()
        return job.exchange(rank).ask("join", rank, sum)

    for rank, error in enumerate(job.each(ask)):
        assert error is None if rank == 5 else isinstance(error, GenerationOverError), error


@pytest.mark.parametrize("first", [0, FAN_OUT * 2])
def test_what_one_rank_tells_its_neighbours_all_come_to_know(ranks, first):
    job = ranks(FAN_OUT * 2 + 3)

    def hear(rank: int) -> int:
        if rank != first:
            job.stores[rank].wait([f"fault/{rank}"])
        spread(job.stores[rank], "fault", rank, FAN_OUT * 2 + 3)
        return rank

    assert job.each(hear) == list(range(FAN_OUT * 2 + 3))
