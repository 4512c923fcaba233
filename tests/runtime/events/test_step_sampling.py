"""Whose steps a log has, and that what is made of it is right for the others, too."""

from __future__ import annotations

from typing import Any

import pytest
from made_events import entry, events_of

from hyperpod_ext.runtime.coordinator.reports import StepSampler
from hyperpod_ext.runtime.events.event import Event
from hyperpod_ext.runtime.events.of_training import ALL_SAMPLED_UP_TO, count_sampled, is_sampled
from hyperpod_ext.runtime.events.report import make_report
from hyperpod_ext.runtime.metrics.meters import Meters

OWN = ("generation", "rank", "step", "began", "data_s")


@pytest.mark.parametrize("world_size", [1, 2, 63, 64, 65, 129, 130, 131, 258, 259, 1000, 8192, 16384])
def test_so_many_ranks_are_sampled(world_size: int) -> None:
    sampled = [rank for rank in range(world_size) if is_sampled(rank)]
    assert count_sampled(world_size) == len(sampled)
    assert sampled[:ALL_SAMPLED_UP_TO] == list(range(min(world_size, ALL_SAMPLED_UP_TO)))


def test_ranks_of_every_place_on_their_nodes_are_among_them() -> None:
    assert {rank % 8 for rank in range(ALL_SAMPLED_UP_TO, 8192) if is_sampled(rank)} == set(range(8))


def test_steps_of_a_large_job_are_those_of_a_few_dozen_ranks() -> None:
    sampler = StepSampler()
    assert sum(sampler.takes(rank, 1, OWN) for rank in range(8192)) == count_sampled(8192) == 127


def test_what_a_script_logs_is_taken_of_the_lowest_rank_that_logs_it() -> None:
    """A pipeline's last stage has the loss; where all ranks log it, rank 0's is enough."""
    sampler, logs = StepSampler(), (*OWN, "loss")
    of_last_stage = [rank for rank in range(7168, 8192) if sampler.takes(rank, 1, logs)]
    assert of_last_stage == [7168, *(rank for rank in range(7169, 8192) if is_sampled(rank))]
    assert [sampler.takes(rank, 1, logs) for rank in (7168, 7171, 7168)] == [True, False, True], "the next step"
    assert not sampler.takes(7168, 1, OWN)
    assert sampler.takes(7500, 2, logs), "who has it may be another in the next generation"
    everywhere = StepSampler()
    came_first = [rank for rank in (5000, 300, 7000, 0, 4000, 300) if everywhere.takes(rank, 1, logs)]
    assert came_first == [5000, 300, 0]


RANKS = 300


def log_of_a_large_job() -> list[dict[str, Any]]:
    """300 ranks make three steps; then rank 200, which is not sampled, dies, and all go on after step 2."""
    sampled = [rank for rank in range(RANKS) if is_sampled(rank)]

    def of_all(t: float, event: str, **fields: Any) -> list[dict[str, Any]]:
        return [entry(t, event, rank=rank, **fields) for rank in range(RANKS)]

    def of_sampled(step: int, generation: int, t: float) -> list[dict[str, Any]]:
        return [entry(t, "step", rank=rank, step=step, generation=generation, began=t - 1.0) for rank in sampled]

    return [
        entry(0.0, "job_started", world_size=RANKS, nodes=1),
        *of_all(0.5, "joined", pid=1),
        entry(1.0, "generation", generation=1, step=0, world_size=RANKS),
        entry(1.0, "go", step=0),
        *of_all(1.0, "begun", step=0, generation=1),
        *[each for step in (1, 2, 3) for each in of_sampled(step, 1, 1.0 + step)],
        entry(4.5, "fault", rank=200, node=0, step=4, cause="killed by SIGKILL (9)", died=True),
        *[entry(4.6, "aborted", rank=rank, step=3) for rank in sampled],
        *[entry(4.7, "joined", rank=rank, pid=1) for rank in sampled],
        entry(4.7, "joined", rank=200, pid=2),
        entry(4.8, "generation", generation=2, step=2, world_size=RANKS),
        entry(4.9, "go", step=2),
        *of_all(5.0, "begun", step=2, generation=2),
        *[each for step in (3, 4) for each in of_sampled(step, 2, 3.0 + step)],
        *of_all(7.0, "done", digest="d"),
        entry(7.5, "job_ended"),
    ]


def test_the_report_of_a_large_job_is_of_sampled_ranks() -> None:
    report = make_report(events_of(log_of_a_large_job()), state="succeeded", error=None, world_size=RANKS)
    (recovery,) = report["recoveries"]
    assert (report["steps"], report["steps_lost"], recovery["resumed_step"], report["weights"]) == (4, 1, 2, "d")
    assert recovery["survivor_pids_kept"], "whoever is not told of has the process that it had"
    sampled = [str(rank) for rank in range(RANKS) if is_sampled(rank)]
    assert list(report["phases"]) == sampled
    assert list(recovery["timeline"]) == [*sampled, "200"], "a rank that failed is in the timeline of its recovery"
    assert [phase for phase, _, _ in recovery["timeline"]["200"]] == ["agree", "rebuild", "first_step"]
    for seconds in report["phases"].values():
        assert sum(seconds.values()) == pytest.approx(7.5)
        assert seconds["lost_work"] == pytest.approx(1.5)


def test_numbers_of_a_large_job_while_it_runs() -> None:
    meters, at_the_fault = Meters(), set[int]()
    events: list[Event] = events_of(log_of_a_large_job())
    for event in events:
        meters.add(event)
        if event.t == 4.5:
            at_the_fault = set(meters.ranks)
    assert at_the_fault == {200, *(rank for rank in range(RANKS) if is_sampled(rank))}
    assert (meters.step, meters.steps_made, meters.steps_lost, meters.recoveries) == (4, 4, 1, 1)
    assert all(is_sampled(rank) for rank in meters.ranks), "of the others nothing is heard while they train"
