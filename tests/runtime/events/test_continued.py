"""What a report says of steps that were made while ranks were missing."""

from __future__ import annotations

from typing import Any

import pytest
from made_events import entry, events_of

from hyperpod_ext.runtime.events.capacity import differences, find_continued
from hyperpod_ext.runtime.events.report import find_recoveries


def resized(generation: int, step: int, ranks: int, cause: str, samples: str = "constant") -> dict[str, Any]:
    fields = {"order": "", "nodes": 1, "of": 1, "local_share": 1.0, "pause_s": 0.1, "pids_kept": True}
    more = {"full_size": 4, "samples": samples, "cause": cause}
    return entry(10.0 + step, "resized", generation=generation, step=step, world_size=ranks, **fields, **more)


def begun(generation: int, reproducible: bool) -> dict[str, Any]:
    return entry(10.0, "begun", rank=0, step=0, generation=generation, reproducible=reproducible)


@pytest.mark.parametrize(
    ("samples", "reproducible", "differs"),
    [("constant", True, ""), ("constant", False, "in another order"), ("fewer", True, "3 of 4 ranks' share")],
)
def test_what_differs_is_said_in_words(samples: str, reproducible: bool, differs: str):
    story = [begun(2, reproducible), resized(2, 4, 3, "continued", samples), resized(3, 7, 4, "rejoined", samples)]
    (one,) = find_continued(events_of(story), 20)
    assert (one["first_step"], one["last_step"], one["ranks"], one["of"]) == (5, 7, 3, 4)
    assert differs in one["differs"]
    assert bool(one["differs"]) == bool(differs)
    assert len(list(differences([one]))) == bool(differs)


def test_ranks_that_never_came_back_and_a_second_loss():
    story = [resized(2, 4, 3, "continued"), resized(3, 6, 2, "continued")]
    found = find_continued(events_of(story), 20)
    assert [(one["first_step"], one["last_step"], one["ranks"]) for one in found] == [(5, 6, 3), (7, 20, 2)]


def test_a_recovery_without_two_that_died_one_after_the_other_says_whose_state_the_others_have():
    def joined(t: float, pids: dict[int, int]) -> list[dict[str, Any]]:
        return [entry(t, "joined", rank=rank, pid=pid) for rank, pid in pids.items()]

    def died(t: float, rank: int) -> dict[str, Any]:
        return entry(t, "fault", rank=rank, step=5, died=True, escalation_level="process")

    def world(t: float, moved: dict[int, int]) -> dict[str, Any]:
        return entry(t, "world", world_size=len(moved), moved=moved, cause="continued", full_size=4)

    story = [
        *joined(1.0, {0: 10, 1: 11, 2: 12, 3: 13}),
        entry(1.1, "generation", generation=1, world_size=4),
        died(5.0, 2),
        world(5.1, {0: 0, 1: 1, 3: 2}),
        died(5.2, 0),
        world(5.3, {1: 1, 2: 0}),
        *joined(5.4, {0: 13, 1: 11}),
        entry(5.5, "generation", generation=3, step=4, world_size=2),
        *(entry(5.6, "restored", generation=3, rank=rank, step=4, source="self") for rank in (0, 1)),
    ]
    (recovery,) = find_recoveries(events_of(story), world_size=4)
    assert (recovery["source"], recovery["survivor_pids_kept"]) == ("self", True)


def test_a_resize_that_somebody_ordered_is_none():
    ordered = resized(2, 4, 3, "order") | {"full_size": None}
    assert find_continued(events_of([ordered]), 20) == []
