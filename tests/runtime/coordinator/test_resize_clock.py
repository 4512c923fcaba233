"""What a resize took, from the steps that ranks report."""

from __future__ import annotations

from made_events import made

from hyperpod_ext.runtime.coordinator.resize_clock import ResizeClock
from hyperpod_ext.runtime.events.event import Events

WORLD = {"order": "a", "nodes": 2, "of": 3, "generation": 2, "moved": {"0": 0, "1": 1}}
MOVED = {0: 0, 1: 1}


def test_the_pause_lasts_from_the_last_step_before_to_the_first_one_after() -> None:
    clock = ResizeClock()
    for rank in (0, 1, 2):
        clock.joined(rank, 100 + rank)
    assert clock.stepped(1, 7, 0.0, 10.0) is None
    assert clock.reassigned(WORLD, MOVED) is None
    assert clock.stepped(1, 7, 0.0, 10.5) is None, "of a rank that was slower to say so"
    for rank in (0, 1):
        clock.joined(rank, 100 + rank)
    known = {"order": "a", "nodes": 2, "of": 3, "generation": 2}
    assert clock.stepped(2, 8, 12.0, 13.0) == {**known, "step": 7, "pause_s": 1.5, "pids_kept": True}
    assert clock.stepped(2, 9, 13.0, 14.0) is None


def test_a_process_that_was_replaced_has_not_been_kept() -> None:
    clock = ResizeClock()
    clock.joined(0, 100)
    clock.reassigned(WORLD, {0: 0})
    clock.joined(0, 999)
    resized = clock.stepped(2, 8, 12.0, 13.0)
    assert resized is not None
    assert not resized["pids_kept"]


def test_a_resize_that_comes_to_no_step_is_refused_to_who_asked_for_it() -> None:
    clock = ResizeClock()
    clock.reassigned(WORLD, MOVED)
    refused = clock.reassigned(WORLD | {"order": "", "nodes": 1, "generation": 3}, {0: 0})
    assert refused == {"order": "a", "nodes": 2, "why": "nodes were lost in the meantime; the job has 1"}
    assert clock.reassigned(WORLD, MOVED) is None, "nobody had asked for the one before"


def test_another_coordinator_tells_how_a_resize_ended_that_it_has_not_begun() -> None:
    before = [made(0.5, "joined", rank=rank, pid=100 + rank) for rank in (0, 1, 2)]
    begun = made(1.0, "world", **WORLD)
    after = made(1.5, "joined", rank=0, pid=100)
    clock = ResizeClock()
    clock.resume(Events([*before, begun, after]))
    clock.joined(1, 101)
    resized = clock.stepped(2, 8, 12.0, 13.0)
    assert resized is not None
    assert (resized["order"], resized["pause_s"], resized["pids_kept"]) == ("a", 11.0, True)
    clock.resume(Events([*before, begun, after]))
    resized = clock.stepped(2, 8, 12.0, 13.0)
    assert resized is not None
    assert not resized["pids_kept"], "rank 1 has not come"
    clock.resume(Events([begun, made(2.0, "resized")]))
    assert clock.stepped(2, 9, 12.0, 13.0) is None
