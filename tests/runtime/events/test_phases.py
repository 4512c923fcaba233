"""Phases: every second of every rank in exactly one of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_events import entry, events_of

from hyperpod_ext.runtime.events.phases import Span, spans, totals

Entry = dict[str, Any]


def _step(t: float, rank: int, step: int, began: float, generation: int = 1, **fields: Any) -> Entry:
    return entry(t, "step", rank=rank, step=step, of=9, began=began, generation=generation, **fields)


KILLED = [
    entry(0.0, "job_started"),
    *(entry(1.0, "joined", rank=rank, pid=rank) for rank in (0, 1)),
    entry(1.0, "generation", generation=1, step=0),
    *(entry(1.2, "groups_open", rank=rank) for rank in (0, 1)),
    *(entry(1.5, "restored", rank=rank) for rank in (0, 1)),
    *(entry(2.0, "begun", rank=rank, step=0, generation=1) for rank in (0, 1)),
    *(_step(3.0, rank, 1, 2.0, data_s=0.25, checkpoint_s=0.125) for rank in (0, 1)),
    _step(4.0, 0, 2, 3.0),  # rank 1 never finished this one
    entry(4.5, "killed", rank=1),
    entry(4.75, "fault", rank=1, died=True),
    entry(5.0, "worker_started", rank=1),
    entry(5.25, "aborted", rank=0, step=1),
    entry(5.5, "joined", rank=0, pid=0),
    entry(5.5, "joined", rank=1, pid=2),
    entry(5.75, "generation", generation=2, step=1),
    *(entry(6.0, "groups_open", rank=rank) for rank in (0, 1)),
    *(entry(6.5, "restored", rank=rank) for rank in (0, 1)),
    *(entry(7.0, "begun", rank=rank, step=1, generation=2) for rank in (0, 1)),
    *(_step(8.0, rank, 2, 7.0, generation=2) for rank in (0, 1)),
    *(_step(9.0, rank, 3, 8.0, generation=2) for rank in (0, 1)),
    *(entry(9.0, "done", rank=rank) for rank in (0, 1)),
    entry(10.0, "job_ended"),
]


def _by_phase(found: list[Span]) -> dict[str, float]:
    return {phase: seconds for phase, seconds in totals(found).items() if seconds}


def test_a_kill_by_phase():
    found = spans(events_of(KILLED))
    assert _by_phase(found[0]) == {
        "startup": 2.0,
        "data": 0.25,
        "step": 0.625 + 1.0,
        "checkpoint": 0.125,
        "lost_work": 1.0 + 0.5,  # step 2 is made again, and what came after it was broken off
        "detect": 0.25,
        "abort": 0.5,
        "agree": 0.25 + 0.25,
        "rebuild": 0.25 + 0.5,
        "restore": 0.5,
        "first_step": 1.0,
        "idle": 1.0,
    }
    killed = _by_phase(found[1])
    assert "abort" not in killed
    assert killed["lost_work"] == 1.5
    assert killed["rebuild"] == 0.25 + 0.5 + 0.25 + 0.5  # until it is started, until it is there, groups, wrappers


def test_a_fault_that_strikes_while_another_rank_ends_its_step_is_waiting_to_be_seen_there():
    late = [event | {"t": 4.1} if event["event"] == "killed" else event for event in KILLED]
    late.append(_step(4.2, 1, 2, 3.0))  # rank 1 still ends step 2
    seconds = _by_phase(spans(events_of(sorted(late, key=lambda event: event["t"])))[1])
    assert seconds["detect"] == pytest.approx(4.75 - 4.2)
    assert seconds["lost_work"] == pytest.approx(1.2)


def test_nothing_is_told_of_a_log_without_events():
    assert spans(events_of([])) == {}
    assert spans(events_of([entry(3.0, "job_started")])) == {}


_KINDS = ("worker_started", "joined", "groups_open", "restored", "begun", "aborted", "done", "killed", "fault", "step")


@st.composite
def _logs(draw: st.DrawFn) -> list[Entry]:
    """Any events in any order: what a log that was cut, or written by several coordinators, can hold."""
    moments = sorted(draw(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=60)))
    log, generation = [entry(0.0, "job_started")], 0
    for moment in moments:
        kind, rank = draw(st.sampled_from((*_KINDS, "generation"))), draw(st.integers(0, 2))
        if kind == "generation":
            generation += 1
            log.append(entry(moment, kind, generation=generation, step=0))
        elif kind == "step":
            began = moment - draw(st.floats(0.0, 10.0))
            waits = {"data_s": draw(st.floats(0.0, 20.0)), "checkpoint_s": draw(st.floats(0.0, 20.0))}
            log.append(_step(moment, rank, draw(st.integers(1, 9)), began, max(1, generation), **waits))
        else:
            log.append(entry(moment, kind, rank=rank, generation=max(1, generation)))
    return log


@given(_logs())
@settings(max_examples=300, deadline=None)
def test_spans_leave_no_gap_and_never_overlap(log: list[Entry]):
    for rank, found in spans(events_of(log)).items():
        at = log[0]["t"]
        for span in found:
            assert span.rank == rank
            assert span.began == at
            assert span.ended > span.began
            at = span.ended
        assert at == max(event["t"] for event in log) or not found
