"""Who looks after a generation that is over, and how ranks give way to each other meanwhile."""

from __future__ import annotations

import threading
import time

from waiting import until

from hyperpod_ext.runtime.process_group.gloo import cpu_contention as crowd
from hyperpod_ext.runtime.process_group.gloo.abort_watcher import AbortWatcher, Over


def test_generations_are_looked_after_one_after_the_other_until_they_are_left():
    watcher = AbortWatcher()
    for _ in range(2):
        looked = threading.Semaphore(0)
        over = Over(looked.release)
        watcher.look_after(over)
        assert all(looked.acquire(timeout=10.0) for _ in range(3))
        over.leave()
    watcher.end()


def test_a_look_under_way_ends_before_a_rank_has_left_and_none_comes_later():
    begun, may_end, looks = threading.Event(), threading.Event(), []

    def look() -> None:
        begun.set()
        may_end.wait()
        looks.append(time.monotonic())

    over = Over(look)
    watching = threading.Thread(target=over.watch)
    watching.start()
    assert begun.wait(10.0)
    left = threading.Thread(target=over.leave)
    left.start()
    left.join(0.05)
    assert left.is_alive()
    may_end.set()
    left.join(10.0)
    watching.join(10.0)
    assert len(looks) == 1


def test_a_rank_that_is_about_to_leave_is_let_be_for_a_while():
    looks: list[float] = []
    over = Over(lambda: looks.append(time.monotonic()))
    began = time.monotonic()
    over.rest(0.2)
    watching = threading.Thread(target=over.watch)
    watching.start()
    while not looks and time.monotonic() < began + 10.0:
        over._left.wait(0.01)
    over.leave()
    watching.join(10.0)
    assert looks[0] >= began + 0.2


def test_a_look_that_fails_is_not_the_last_one():
    looks: list[int] = []

    def look() -> None:
        looks.append(len(looks))
        if looks == [0]:
            raise OSError(24, "Too many open files")

    over, watcher = Over(look), AbortWatcher()
    watcher.look_after(over)
    until(lambda: len(looks) >= 2)
    over.leave()
    watcher.end()


def test_the_machine_tells_how_many_threads_want_its_cores():
    assert crowd.per_core() > 0


def test_nobody_gives_way_while_there_is_a_core_for_each():
    assert crowd.turn_s(1.0) == crowd.timeout_s(0.5) == 0.0
    crowd.yield_cores(3600.0, lambda: 0.5)


def test_a_rank_gives_way_until_the_crowd_is_gone_but_no_longer_than_it_has_patience():
    sizes = iter([30.0, 15.0, 1.0])
    crowd.yield_cores(3600.0, lambda: next(sizes))
    assert list(sizes) == []
    began = time.monotonic()
    crowd.yield_cores(crowd.timeout_s(30.0), lambda: 30.0)
    assert time.monotonic() - began >= 0.03
    assert crowd.timeout_s(10_000.0) <= 0.05
