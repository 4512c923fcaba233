"""Meters: what a job's events come to while it runs, and how Prometheus reads it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from made_events import made

from hyperpod_ext.runtime.events.event import Event, Events
from hyperpod_ext.runtime.events.phases import PHASES, spans, totals
from hyperpod_ext.runtime.events.report import make_report
from hyperpod_ext.runtime.metrics.families import Histogram, gauge, render
from hyperpod_ext.runtime.metrics.meters import Meters


def _steps(began: float, step: int, generation: int = 1, **fields: Any) -> list[Event]:
    common = {"step": step, "of": 9, "began": began, "generation": generation, "loss": 9.0 - step, "data_s": 0.25}
    return [made(began + 1.0, "step", rank=rank, **common, **fields) for rank in (0, 1)]


def _both(t: float, event: str, **fields: Any) -> list[Event]:
    return [made(t, event, rank=rank, **fields) for rank in (0, 1)]


BACK_TWO_STEPS = Events(
    [
        made(0.0, "job_started", world_size=2, nodes=2, spares=0),
        *(made(0.5, "worker_started", rank=rank, node=rank) for rank in (0, 1)),
        *_both(1.0, "joined", pid=1),
        made(1.0, "generation", generation=1, step=0, world_size=2),
        *_both(1.5, "groups_open"),
        *_both(1.75, "restored", source="fresh"),
        made(1.75, "go", step=0),
        *_both(2.0, "begun", step=0, generation=1),
        *(event for step in (1, 2, 3) for event in _steps(1.0 + step, step)),
        made(5.5, "fault", rank=1, node=1, step=4, cause="lost", died=True, kind="lost", escalation_level="node"),
        made(5.6, "step", rank=0, step=4, of=4, began=5.0, loss=9.0, generation=1),  # it had passed its last collective
        *_both(6.0, "aborted", step=3),
        *_both(6.5, "joined", pid=2),
        made(6.5, "generation", generation=2, step=1, world_size=2),
        *_both(6.75, "groups_open"),
        *_both(7.0, "restored", source="peer"),
        made(7.0, "go", step=1),
        *_both(7.0, "begun", step=1, generation=2),
        *(event for step in (2, 3, 4) for event in _steps(5.0 + step, step, generation=2)),
        *_both(10.0, "done", digest="d"),
        made(10.0, "job_ended", state="succeeded"),
    ]
)


def told(events: list[Event]) -> Meters:
    meters = Meters()
    for event in events:
        meters.add(event)
    return meters


def test_in_the_end_it_says_what_the_report_says():
    meters = told(BACK_TWO_STEPS)
    report = make_report(BACK_TWO_STEPS, state="succeeded", error=None, world_size=2)
    phases = [totals(of_rank) for of_rank in spans(BACK_TWO_STEPS).values()]
    kept = sum(own[phase] for own in phases for phase in ("step", "data", "checkpoint", "first_step"))
    assert meters.goodput == pytest.approx(kept / 20.0)
    assert meters.steps_lost == report["steps_lost"] == 2
    assert meters.recoveries == len(report["recoveries"]) == 1
    assert (meters.step, meters.steps_made, meters.loss, meters.state) == (4, 4, 5.0, "succeeded")
    assert meters.recovery_seconds.sum == 8.0 - 5.5
    for phase in set(PHASES) - {"step", "data", "lost_work"}:  # what is lost later counts as made when it is made
        assert meters.seconds[phase] == pytest.approx(sum(own[phase] for own in phases)), phase
    assert sum(meters.seconds.values()) == pytest.approx(20.0)
    meters.add(made(10.5, "step", rank=0, step=4, of=9, began=9.0, generation=2))
    assert meters.state == "succeeded", "news of a step may come late"


def test_while_it_runs_it_says_what_every_rank_does():
    seen = [event for event in BACK_TWO_STEPS if event.t <= 5.5]
    meters = told(seen)
    assert (meters.state, meters.step, meters.goodput) == ("recovering", 3, pytest.approx(6.0 / 10.5, rel=0.1))
    assert [meters.ranks[rank].phase for rank in (0, 1)] == ["abort", "rebuild"]
    assert [meters.ranks[rank].node for rank in (0, 1)] == [0, 1]
    assert meters.faults == {("lost", "node"): 1}


def test_no_events_and_one_event_are_no_numbers_rather_than_wrong_ones():
    for events in ([], BACK_TWO_STEPS[:1]):
        meters = told(events)
        assert meters.goodput is None
        text = render(meters.families(0.0))
        assert "hpx_goodput_ratio" not in text
        assert "hpx_last_step" not in text
        samples = [line for line in text.splitlines() if not line.startswith("# HELP")]  # a help text has "NaN guard"
        assert "nan" not in "\n".join(samples).lower()


def test_a_node_that_is_started_again_counts_its_failed_copies_from_zero():
    meters = Meters()
    for failed, step in ((2, 10), (3, None), (1, 20)):
        meters.add(made(1.0, "copying", tier="peer", node=1, failed=failed, newest_step=step))
    meters.add(made(1.0, "copying", tier="peer", node=0, failed=4, newest_step=15))
    assert meters.tiers == {"peer": 20}
    assert meters.tier_failures == {"peer": 3 + 4}


def test_it_stays_small_however_long_the_job_runs():
    meters = told(BACK_TWO_STEPS[:13])
    for step in range(1, 20_001):
        for event in _steps(float(step), step):
            meters.add(event)
    assert len(meters._recent) <= 4096
    assert meters.steps_made == 20_000


def test_the_text_is_quoted_and_has_no_number_that_is_none():
    families = [gauge("a", "first\nsecond", 0.5), gauge("b", "none yet", None), gauge("c", "broken", math.nan)]
    text = '# HELP a first\\nsecond\n# TYPE a gauge\na{hpx_job="x\\"y\\\\"} 0.5\n'
    assert render(families, (("hpx_job", 'x"y\\'),)) == text


def test_buckets_hold_what_is_at_most_their_bound():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.observe(value)
    said = [(dict(sample.labels).get("le", sample.suffix), sample.value) for sample in histogram.samples()]
    assert said == [("1", 2), ("2", 3), ("+Inf", 4), ("_sum", 10.0), ("_count", 4)]
