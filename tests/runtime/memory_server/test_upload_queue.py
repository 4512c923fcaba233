"""Which snapshots a durable tier is to get, and which give way: decided without a thread, a store or a byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from hyperpod_ext.config.checkpoint.file import FileTier
from hyperpod_ext.errors import NotFoundError
from hyperpod_ext.runtime.memory_server.upload_queue import UploadQueue


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
def make_queue(pins):
    def make(when_busy="supersede", owners=2, **tier):
        return UploadQueue(
            FileTier(path="/p", **(tier or {"every_steps": 10})),
            pins.pin,
            node=0,
            nodes=1,
            owners=owners,
            when_busy=when_busy,
        )

    return make


def seal(queue: UploadQueue, step: int, *owners: int, generation: int = 1, now: bool = False) -> list[bool]:
    """These ranks seal the snapshot of a step; what each of them was told."""
    manifest = {"save_id": f"g{generation}-s{step}", "generation": generation, "step": step, "nbytes": 1000}
    return [queue.take(owner, manifest, lambda: None, now=now) for owner in owners or (0, 1)]


def steps(queue: UploadQueue) -> list[int]:
    return [task.step for task in queue.tasks]


def test_a_step_is_in_line_once_all_ranks_of_the_node_have_sealed_it(make_queue, pins):
    queue = make_queue()
    assert seal(queue, 10, 1) == [False]
    assert (steps(queue), pins.held) == ([], {(1, "g1-s10")})
    assert seal(queue, 10, 0) == [True]
    assert (steps(queue), len(pins.held)) == ([10], 2)


def test_a_step_that_one_rank_overwrote_gives_way_to_the_next(make_queue, pins):
    queue = make_queue()
    pins.overwritten.add((1, "g1-s10"))
    assert seal(queue, 10) == [False, False]
    seal(queue, 20)
    assert steps(queue) == [20]
    assert pins.held == {(0, "g1-s20"), (1, "g1-s20")}


@pytest.mark.parametrize(
    ("when_busy", "waiting", "superseded", "skipped"),
    [("supersede", [30], 1, 0), ("wait", [20, 30], 0, 0), ("skip", [], 0, 2)],
)
def test_what_is_due_while_another_is_on_its_way(make_queue, pins, when_busy, waiting, superseded, skipped):
    queue = make_queue(when_busy)
    seal(queue, 10)
    assert queue.next().step == 10
    seal(queue, 20)
    seal(queue, 30)
    assert (steps(queue), queue.superseded, queue.skipped) == (waiting, superseded, skipped)
    assert {save_id for _, save_id in pins.held} == {f"g1-s{step}" for step in [10, *waiting]}


def test_a_step_is_left_out_for_all_ranks_or_for_none(make_queue):
    queue = make_queue("skip")
    seal(queue, 10)
    task = queue.next()
    seal(queue, 20, 0)
    queue.current = None  # it has arrived in the meantime
    task.drop()
    assert seal(queue, 20, 1) == [False]
    assert steps(queue) == []


def test_one_that_waits_for_other_nodes_keeps_nothing_from_being_taken(make_queue):
    queue = make_queue("skip")
    seal(queue, 10)
    queue.next()
    queue.waiting = True
    seal(queue, 20)
    assert steps(queue) == [20]


def test_at_the_end_of_a_job_nothing_is_skipped(make_queue):
    queue = make_queue("skip")
    seal(queue, 10)
    queue.next()
    seal(queue, 11, now=True)
    assert steps(queue) == [11]


def test_a_new_generation_drops_what_it_gave_up_and_keeps_what_came_before(make_queue, pins):
    queue = make_queue("wait")
    for step in (10, 20, 30):
        seal(queue, step)
    seal(queue, 40, 0)  # the other rank died
    under_way = queue.next()
    queue.enter(2, 20, stored=False, now=0.0)
    assert (steps(queue), under_way.dropped) == ([], False)
    assert {save_id for _, save_id in pins.held} == {"g1-s10"}
    seal(queue, 20, generation=2)
    assert [task.save_id for task in queue.tasks] == ["g2-s20"]


def test_a_step_that_the_new_generation_does_not_save_again_stays_in_line(make_queue):
    queue = make_queue("wait")
    for step in (10, 20, 30):
        seal(queue, step)
    under_way = queue.next()
    queue.enter(2, 10, stored=False, now=0.0, again=False)
    assert (steps(queue), under_way.dropped) == ([], False)
    seal(queue, 20, generation=2)
    queue.enter(3, 20, stored=False, now=0.0, again=False)
    assert (steps(queue), under_way.dropped) == ([20], False)


def test_what_is_under_way_ends_where_its_step_was_given_up(make_queue, pins):
    queue = make_queue()
    seal(queue, 20)
    under_way = queue.next()
    queue.enter(2, 10, stored=False, now=0.0)
    assert under_way.cancelled()
    assert len(pins.held) == 2  # its thread lets go of them


def test_which_steps_are_due(make_queue):
    queue = make_queue()
    assert [queue.is_due(step) for step in (0, 5, 10)] == [True, False, True]
    queue.ask(5)
    assert queue.is_due(5)
    queue.enter(2, 10, stored=True, now=0.0)  # it is there already
    assert not queue.is_due(10)
    by_time = make_queue(every_seconds=60.0)
    assert not by_time.is_due(7)
    by_time.ask(7)
    assert by_time.is_due(7)


def test_how_often_all_nodes_were_asked_for_a_step_is_counted(make_queue):
    """Not how often one asks how far it is."""
    queue = make_queue("wait")
    seal(queue, 10)
    attempts = [queue.next().attempt]
    for ends in (False, False, True, False, True):
        queue.name("g1-s10")
        if queue.current is None:
            seal(queue, 10, now=True)
            queue.next()
        attempts.append(queue.current.attempt)
        queue.current = None if ends else queue.current
    assert attempts == [0, 1, 1, 1, 2, 2]
    queue.name("g1-s20")
    seal(queue, 20, now=True)
    assert queue.next().attempt == 1


def test_what_is_on_its_way_or_has_arrived_is_known(make_queue):
    queue = make_queue("wait")
    seal(queue, 10)
    seal(queue, 20)
    queue.uploaded = f"g1-s{queue.next().step}"
    queue.current = None
    known = [(queue.has_arrived(step, f"g1-s{step}"), queue.on_its_way(f"g1-s{step}")) for step in (10, 20, 30)]
    assert known == [(True, None), (False, queue.tasks[0]), (False, None)]


@pytest.mark.parametrize(("when_busy", "passed"), [("supersede", True), ("skip", True), ("wait", False)])
def test_others_are_not_waited_for_once_a_newer_step_is_in_line(make_queue, when_busy, passed):
    queue = make_queue(when_busy)
    seal(queue, 10)
    task = queue.next()
    assert not queue.is_passed(task, 1e9)
    queue.waiting = True
    seal(queue, 20)
    assert queue.is_passed(task, 0.0) is passed


def test_a_node_that_was_lost_is_waited_for_half_a_minute(make_queue):
    queue = make_queue("wait")
    seal(queue, 10)
    task = queue.next()
    queue.enter(2, 15, stored=False, now=100.0)
    assert not queue.is_passed(task, 129.0)
    assert queue.is_passed(task, 131.0)


def test_what_another_node_may_have_lost_is_waited_for_no_more(make_queue):
    queue = make_queue(when_busy="wait", owners=1, every_steps=1)
    queue.newest = 5
    seal(queue, 5, 0)
    assert not queue.is_passed(queue.tasks[0], 0.0)
    queue.forsake()  # its ranks may have been a step further
    seal(queue, 6, 0)
    seal(queue, 7, 0)
    assert [queue.is_passed(task, 0.0) for task in queue.tasks] == [True, True, False]
    queue.enter(2, 5, False, 0.0)
    seal(queue, 6, 0, generation=2)
    assert not queue.is_passed(queue.tasks[-1], 0.0)


def test_what_all_nodes_hold_is_waited_for_though_some_have_left(make_queue):
    """At the end of a job they say so. One that is lost after that is waited for no more."""
    queue = make_queue(when_busy="wait", owners=1, every_steps=1)
    queue.newest = 5
    queue.forsake()
    seal(queue, 5, 0)
    for passed in (False, True):
        queue.name("g1-s5")
        assert queue.is_passed(queue.tasks[0], 0.0) is passed
        queue.forsake()
