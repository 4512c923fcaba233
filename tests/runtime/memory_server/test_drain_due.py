"""Which snapshots a durable tier is to get, and which give way: decided without a thread, a store or a byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from hyperpod_ext.config.checkpoint import FileTier
from hyperpod_ext.errors import NotFoundError
from hyperpod_ext.runtime.memory_server.upload_queue import Due


class Pins:
    """Which snapshots are kept in their slots."""

    def __init__(self) -> None:
        self.held: set[tuple[int, str]] = set()
        self.overwritten: set[tuple[int, str]] = set()

    @contextmanager
    def pin(self, owner: int, save_id: str) -> Iterator[Any]:
        if (owner, save_id) in self.overwritten:
            raise NotFoundError(save_id)
        self.held.add((owner, save_id))
        yield SimpleNamespace(cancelled=lambda: False, on_cancel=None)
        self.held.discard((owner, save_id))


@pytest.fixture
def pins() -> Pins:
    return Pins()


@pytest.fixture
def make_due(pins):
    def make(when_busy="supersede", owners=2, **tier):
        return Due(
            FileTier(path="/p", **(tier or {"every_steps": 10})), pins.pin, nodes=1, owners=owners, when_busy=when_busy
        )

    return make


def seal(due: Due, step: int, *owners: int, generation: int = 1, now: bool = False) -> list[bool]:
    """These ranks seal the snapshot of a step; what each of them was told."""
    manifest = {"save_id": f"g{generation}-s{step}", "generation": generation, "step": step, "nbytes": 1000}
    return [due.take(owner, manifest, lambda: None, now=now) for owner in owners or (0, 1)]


def steps(due: Due) -> list[int]:
    return [work.step for work in due.queue]


def test_a_step_is_in_line_once_all_ranks_of_the_node_have_sealed_it(make_due, pins):
    due = make_due()
    assert seal(due, 10, 1) == [False]
    assert (steps(due), pins.held) == ([], {(1, "g1-s10")})
    assert seal(due, 10, 0) == [True]
    assert (steps(due), len(pins.held)) == ([10], 2)


def test_a_step_that_one_rank_overwrote_gives_way_to_the_next(make_due, pins):
    due = make_due()
    pins.overwritten.add((1, "g1-s10"))
    assert seal(due, 10) == [False, False]
    seal(due, 20)
    assert steps(due) == [20]
    assert pins.held == {(0, "g1-s20"), (1, "g1-s20")}


@pytest.mark.parametrize(
    ("when_busy", "waiting", "superseded", "skipped"),
    [("supersede", [30], 1, 0), ("wait", [20, 30], 0, 0), ("skip", [], 0, 2)],
)
def test_what_is_due_while_another_is_on_its_way(make_due, pins, when_busy, waiting, superseded, skipped):
    due = make_due(when_busy)
    seal(due, 10)
    assert due.next().step == 10
    seal(due, 20)
    seal(due, 30)
    assert (steps(due), due.superseded, due.skipped) == (waiting, superseded, skipped)
    assert {save_id for _, save_id in pins.held} == {f"g1-s{step}" for step in [10, *waiting]}


def test_a_step_is_left_out_for_all_ranks_or_for_none(make_due):
    due = make_due("skip")
    seal(due, 10)
    work = due.next()
    seal(due, 20, 0)
    due.current = None  # it has arrived in the meantime
    work.drop()
    assert seal(due, 20, 1) == [False]
    assert steps(due) == []


def test_one_that_waits_for_other_nodes_keeps_nothing_from_being_taken(make_due):
    due = make_due("skip")
    seal(due, 10)
    due.next()
    due.waiting = True
    seal(due, 20)
    assert steps(due) == [20]


def test_at_the_end_of_a_job_nothing_is_skipped(make_due):
    due = make_due("skip")
    seal(due, 10)
    due.next()
    seal(due, 11, now=True)
    assert steps(due) == [11]


def test_a_new_generation_drops_what_it_gave_up_and_keeps_what_came_before(make_due, pins):
    due = make_due("wait")
    for step in (10, 20, 30):
        seal(due, step)
    seal(due, 40, 0)  # the other rank died
    under_way = due.next()
    due.enter(2, 20, stored=False, now=0.0)
    assert (steps(due), under_way.dropped) == ([], False)
    assert {save_id for _, save_id in pins.held} == {"g1-s10"}
    seal(due, 20, generation=2)
    assert [work.save_id for work in due.queue] == ["g2-s20"]


def test_what_is_under_way_ends_where_its_step_was_given_up(make_due, pins):
    due = make_due()
    seal(due, 20)
    under_way = due.next()
    due.enter(2, 10, stored=False, now=0.0)
    assert under_way.cancelled()
    assert len(pins.held) == 2  # its thread lets go of them


def test_which_steps_are_due(make_due):
    due = make_due()
    assert [due.is_due(step) for step in (0, 5, 10)] == [True, False, True]
    due.ask(5)
    assert due.is_due(5)
    due.enter(2, 10, stored=True, now=0.0)  # it is there already
    assert not due.is_due(10)
    by_time = make_due(every_seconds=60.0)
    assert not by_time.is_due(7)
    by_time.ask(7)
    assert by_time.is_due(7)


def test_what_is_on_its_way_or_has_arrived_is_known(make_due):
    due = make_due("wait")
    seal(due, 10)
    seal(due, 20)
    due.brought = f"g1-s{due.next().step}"
    due.current = None
    known = [(due.has_arrived(step, f"g1-s{step}"), due.on_its_way(f"g1-s{step}")) for step in (10, 20, 30)]
    assert known == [(True, None), (False, due.queue[0]), (False, None)]


@pytest.mark.parametrize(("when_busy", "passed"), [("supersede", True), ("skip", True), ("wait", False)])
def test_others_are_not_waited_for_once_a_newer_step_is_in_line(make_due, when_busy, passed):
    due = make_due(when_busy)
    seal(due, 10)
    work = due.next()
    assert not due.is_passed(work, 1e9)
    due.waiting = True
    seal(due, 20)
    assert due.is_passed(work, 0.0) is passed


def test_a_node_that_was_lost_is_waited_for_half_a_minute(make_due):
    due = make_due("wait")
    seal(due, 10)
    work = due.next()
    due.enter(2, 15, stored=False, now=100.0)
    assert not due.is_passed(work, 129.0)
    assert due.is_passed(work, 131.0)


def test_what_another_node_may_have_lost_is_waited_for_no_more(make_due):
    due = make_due(when_busy="wait", owners=1, every_steps=1)
    due.newest = 5
    seal(due, 5, 0)
    assert not due.is_passed(due.queue[0], 0.0)
    due.forsake()  # its ranks may have been a step further
    seal(due, 6, 0)
    seal(due, 7, 0)
    assert [due.is_passed(work, 0.0) for work in due.queue] == [True, True, False]
    due.enter(2, 5, False, 0.0)
    seal(due, 6, 0, generation=2)
    assert not due.is_passed(due.queue[-1], 0.0)
