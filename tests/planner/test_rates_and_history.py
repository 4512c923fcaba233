"""Failure rates: published, fitted, and read from a job's own log. Never NaN, whatever is missing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_events import entry

from hyperpod_ext.errors import ConfigError, NotFoundError
from hyperpod_ext.planner.interval_tuning import Measured, believed_rate, prior_rates, tune
from hyperpod_ext.planner.rates import Rates, fit, published
from hyperpod_ext.runtime.events.history import read_history


def test_the_published_run_fails_as_often_as_was_published() -> None:
    rates = published("llama3-405b").of_job(2048)
    assert rates.total * 54 * 86400 == pytest.approx(419)
    assert 1 / rates.total / 3600 == pytest.approx(3.1, abs=0.01)
    assert "419 unexpected interruptions" in rates.source
    with pytest.raises(NotFoundError):
        published("llama4")


@pytest.mark.parametrize(
    ("events", "low", "high"),
    [(0, 0.0, 3.688879), (1, 0.025318, 5.571643), (10, 4.795389, 18.390356), (419, 379.8, 461.1)],
)
def test_the_interval_of_a_count_is_garwoods(events: int, low: float, high: float) -> None:
    """The first three from the tables of Poisson confidence limits."""
    found = fit(events, 1.0)
    assert (found.low, found.high) == (pytest.approx(low, rel=2e-4), pytest.approx(high, rel=2e-4))
    assert found.low <= found.rate <= found.high


def test_no_event_and_one_event_give_a_clear_answer() -> None:
    none, one = fit(0, 3600.0), fit(1, 3600.0)
    assert (none.rate, one.rate) == (0.5 / 3600, 1 / 3600)
    assert none.low == 0.0
    assert all(math.isfinite(value) for value in (none.high, one.low, one.high))


@pytest.mark.parametrize(("events", "exposure"), [(-1, 1.0), (1, 0.0), (1, math.nan), (1, math.inf)])
def test_a_count_without_time_is_refused(events: int, exposure: float) -> None:
    with pytest.raises(ValueError, match="a rate needs a positive time"):
        fit(events, exposure)


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf])
def test_a_rate_that_is_no_number_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="node: "):
        Rates(0.0, rate, 0.0, "")


def write(folder: Path, *events: dict[str, Any], tail: str = "") -> Path:
    file = folder / "events.jsonl"
    file.write_text("".join(json.dumps(event) + "\n" for event in events) + tail)
    return file


STARTED = entry(100.0, "job_started", nodes=4, world_size=8, spares=1)


def steps(count: int, took: float = 2.0) -> list[dict[str, Any]]:
    return [entry(100.0 + took * (i + 1), "step", step=i + 1, began=100.0 + took * i) for i in range(count)]


def lost(t: float, node: int) -> list[dict[str, Any]]:
    """A lost node is also a fault of each of its ranks."""
    faults = [entry(t, "fault", rank=2 * node + i, node=node, escalation_level="node") for i in range(2)]
    return [entry(t, "node_lost", node=node, cause="gone"), *faults]


def test_faults_are_counted_by_what_was_lost(tmp_path: Path) -> None:
    events = [STARTED, *steps(1800)]
    events += [entry(200.0, "fault", rank=1, node=0, escalation_level="process"), entry(203.0, "go")]
    events += [*lost(900.0, 1), entry(905.0, "go"), *lost(2000.0, 2), *lost(2001.0, 3)]
    history = read_history(write(tmp_path, *events))
    assert (history.process.events, history.node.events, history.correlated.events) == (1, 1, 1)
    assert history.wall_s == 3600.0
    assert history.process.exposure == 4 * 3600.0
    assert history.step_s == 2.0
    assert history.recovery_s == 4.0
    assert "1 of processes" in history.rates().source


def test_injected_faults_are_no_failures(tmp_path: Path) -> None:
    """A rehearsal is not counted, the real fault after it is; a rank that went on was not harmed."""
    events = [STARTED, *steps(1800)]
    events += [entry(150.0, "killed", rank=1, step=20), entry(150.1, "fault", rank=1, node=0, step=20)]
    events += [entry(150.1, "fault", rank=2, node=1, step=20, late=True), entry(151.0, "go")]
    events += [entry(400.0, "injected", kind="slow", rank=0, step=150)]  # goes on
    events += [entry(900.0, "fault", rank=0, node=0, step=400), entry(900.5, "go")]
    events += [
        entry(1500.0, "injected", kind="sigkill", node=1, node_fault=True),
        *lost(1501.0, 1),
        entry(1502.0, "go"),
    ]
    events += [*lost(2000.0, 2), entry(2001.0, "go")]
    history = read_history(write(tmp_path, *sorted(events, key=lambda event: event["t"])))
    assert (history.process.events, history.node.events, history.rehearsed) == (1, 1, 2)
    assert "2 injected faults left out" in history.rates().source


def test_a_history_without_faults_gives_rates_that_are_above_zero(tmp_path: Path) -> None:
    write(tmp_path, STARTED, *steps(10))
    history = read_history(tmp_path)  # the run directory will do
    rates = history.rates()
    assert rates.process == 0.5 / (4 * 20.0)
    assert (history.recovery_s, history.process.low) == (None, 0.0)


def test_a_log_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    history = read_history(write(tmp_path, STARTED, *steps(5), tail='{"t": 111.0, "eve'))
    assert history.wall_s == 10.0
    assert history.warnings == (f"{tmp_path / 'events.jsonl'}:7: the last line is cut off; it was left out",)


def test_damage_in_the_middle_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text(json.dumps(STARTED) + "\n{broken\n" + json.dumps(STARTED) + "\n")
    with pytest.raises(ConfigError, match=r"events\.jsonl:2: is not an event"):
        read_history(file)


@pytest.mark.parametrize("events", [[], [STARTED]])
def test_a_history_of_one_event_says_that_nothing_can_be_concluded(tmp_path: Path, events: list[Any]) -> None:
    with pytest.raises(ConfigError, match="no failure rates can be computed"):
        read_history(write(tmp_path, *events))


def test_a_history_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no file"):
        read_history(tmp_path / "nowhere.jsonl")


# --- a running job changes its own interval ---------------------------------------------------------


def test_what_was_seen_outweighs_what_was_expected_as_time_goes_on() -> None:
    prior = 1 / 36_000
    assert believed_rate(0, 0.0, prior) == prior
    assert believed_rate(0, 36_000.0, prior) == prior / 2
    assert believed_rate(100, 36_000.0, prior) == pytest.approx(101 / 72_000)
    assert prior_rates(2048).total == pytest.approx(419 / (54 * 86400))


def test_an_interval_goes_towards_the_best_by_at_most_two_times() -> None:
    measured = Measured(elapsed=1e6, failures=100, blocked=1.0, latency=5.0)
    interval, seen = 10.0, []
    for _ in range(8):
        interval = tune(interval, measured, 1e-4)
        seen.append(interval)
    assert seen[:3] == [20.0, 40.0, 80.0]
    best = math.sqrt(2 * 1e4)
    assert seen[-1] == seen[-2] == pytest.approx(best, rel=0.15)


def test_small_gains_are_left_alone() -> None:
    measured = Measured(elapsed=1e6, failures=100, blocked=1.0, latency=5.0)
    assert tune(150.0, measured, 1e-4) == 150.0


def test_copies_that_take_long_are_not_asked_for_sooner() -> None:
    assert tune(300.0, Measured(1e6, 1000, 0.001, 400.0), 1e-4) == pytest.approx(400.0, rel=1e-3)


@given(
    st.floats(1e-3, 1e7), st.floats(0, 1e8), st.integers(0, 10**6), st.floats(0, 1e5), st.floats(0, 1e6),
    st.floats(1e-12, 1.0),
)  # fmt: skip
def test_whatever_was_measured_the_interval_stays_a_number(
    interval: float, elapsed: float, failures: int, blocked: float, latency: float, prior: float
) -> None:
    after = tune(interval, Measured(elapsed, failures, blocked, latency), prior)
    assert interval / 2 <= after <= interval * 2


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be tuned"):
        tune(math.nan, Measured(1, 1, 1, 1), 1.0)
    with pytest.raises(ValueError, match="are not valid for a rate"):
        believed_rate(1, 1.0, 0.0)
