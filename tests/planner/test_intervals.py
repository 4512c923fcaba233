"""Intervals: the exact minimiser against brute force, and the classic formulas as its limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext.planner.intervals import best_interval, goodput, lost_per_failure
from hyperpod_ext.planner.levels import Level, best_schedule, total_goodput

COSTS, MTBFS, LATENCIES = (0.01, 0.3, 5.0, 120.0, 3000.0), (600.0, 11_160.0, 1e6), (0.0, 60.0, 2000.0)


def young(cost: float, mtbf: float) -> float:
    """Young 1974: the limit for a cost much smaller than the time between failures."""
    return math.sqrt(2 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    """Daly 2006, the higher-order estimate. Work between saves."""
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def lambert_w0(x: float) -> float:
    """The principal branch of Lambert's W: the w >= -1 with w * exp(w) = x.

    Raises:
        ValueError: x is below -1/e, where there is none.
    """
    if math.e * x < -1 - 1e-12:
        raise ValueError(f"Lambert's W has no real value at {x}; it begins at -1/e")
    near = math.sqrt(max(0.0, 2 * (1 + math.e * x)))  # distance from the branch point
    if near < 1e-4:
        return -1 + near - near**2 / 3
    w = -1 + near - near**2 / 3 if x < 1 else math.log(x) - math.log(max(math.log(x), 1.0))
    for _ in range(50):
        error = w * math.exp(w) - x
        step = error / (math.exp(w) * (w + 1) - (w + 2) * error / (2 * w + 2))  # Halley's
        w -= step
        if abs(step) <= 1e-15 * (1 + abs(w)):
            break
    return w


def brute_force(value: Callable[[float], float], low: float, high: float) -> float:
    """Where `value` is greatest, by looking at ever finer grids."""
    for _ in range(12):
        points = [low * (high / low) ** (i / 400) for i in range(401)]
        best = max(range(401), key=lambda i: value(points[i]))
        low, high = points[max(0, best - 1)], points[min(400, best + 1)]
    return (low + high) / 2


@pytest.mark.parametrize(("cost", "mtbf", "latency"), [*itertools.product(COSTS, MTBFS, LATENCIES)])
def test_the_best_interval_is_that_of_brute_force(cost: float, mtbf: float, latency: float) -> None:
    shortest = max(latency - cost, 1e-3)
    found = brute_force(lambda interval: _log_goodput(interval, cost, mtbf), shortest, 50 * mtbf)
    assert best_interval(cost, mtbf, latency) == pytest.approx(found, rel=1e-3)


def _log_goodput(interval: float, cost: float, mtbf: float) -> float:
    """Of the model, written down once more: logarithms where the numbers are beyond floats."""
    period = (interval + cost) / mtbf
    return math.log(interval) - (period + math.log1p(-math.exp(-period)))


@given(st.floats(1e-4, 1e4), st.floats(10.0, 1e8), st.floats(0.5, 2.0).filter(lambda f: abs(f - 1) > 0.02))
def test_no_other_interval_is_better(cost: float, mtbf: float, factor: float) -> None:
    best = best_interval(cost, mtbf)
    assert _log_goodput(best, cost, mtbf) >= _log_goodput(factor * best, cost, mtbf) - 1e-12


def test_young_and_daly_are_its_limits() -> None:
    """Each is better the smaller the cost beside the time between failures, Daly's by far."""
    errors = []
    for ratio in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5):
        exact = best_interval(ratio * 1e4, 1e4)
        errors.append((abs(young(ratio * 1e4, 1e4) / exact - 1), abs(daly(ratio * 1e4, 1e4) / exact - 1)))
    for (young_before, daly_before), (young_after, daly_after) in itertools.pairwise(errors):
        assert young_after < young_before / 2
        assert daly_after < daly_before / 2 or daly_after < 1e-9
    assert errors[-1][0] < 2e-3
    assert errors[-1][1] < 1e-8
    assert daly(20_000, 1e4) == 1e4  # as the paper has it, where saving costs too much


def test_the_numbers_of_llama_3() -> None:
    """A failure each 3.1 h; saves that block for 0.2, 1 and 5 s."""
    assert [round(best_interval(b, 11_135)) for b in (0.2, 1, 5)] == [67, 149, 330]


@given(st.floats(-1 / math.e, 1e6))
def test_lambert_w_undoes_w_exp_w(x: float) -> None:
    w = lambert_w0(x)
    assert w >= -1
    assert w * math.exp(w) == pytest.approx(x, rel=1e-9, abs=1e-12)


def test_lambert_w_agrees_with_the_minimiser_and_ends_at_its_branch_point() -> None:
    for ratio in (1e-3, 0.1, 1.0, 5.0):
        assert best_interval(ratio, 1.0) == pytest.approx(1 + lambert_w0(-math.exp(-(1 + ratio))), rel=1e-6)
    with pytest.raises(ValueError, match="no real value"):
        lambert_w0(-0.4)


def test_what_never_fails_needs_no_save() -> None:
    assert best_interval(1.0, math.inf) == math.inf
    assert goodput(math.inf, 1.0, math.inf) == 1.0
    assert goodput(9.0, 1.0, math.inf) == 0.9
    assert lost_per_failure(9.0, 1.0, math.inf) == 0.0


def test_numbers_that_mean_nothing_are_refused() -> None:
    for interval, cost, mtbf in ((0.0, 1.0, 1.0), (math.nan, 1.0, 1.0), (1.0, -1.0, 1.0), (1.0, 1.0, 0.0)):
        with pytest.raises(ValueError, match="must be above 0"):
            goodput(interval, cost, mtbf)


def test_a_period_that_outlasts_every_failure_leaves_nothing() -> None:
    assert goodput(1e9, 1.0, 100.0) == 0.0


def test_half_an_interval_is_lost_where_failures_are_rare() -> None:
    assert lost_per_failure(100.0, 0.0, 1e7) == pytest.approx(50.0, rel=1e-3)
    assert lost_per_failure(100.0, 0.0, 1e7, latency=30.0) == pytest.approx(80.0, rel=1e-3)


RATES = [(1e-4, 1e-5, 1e-6), (1e-6, 1e-4, 1e-5), (3e-5, 0.0, 1e-6), (1e-3, 1e-3, 1e-3)]
TIER_COSTS = [(0.05, 0.5, 5.0), (1.0, 0.1, 20.0)]


@pytest.mark.parametrize(("rates", "costs"), [*itertools.product(RATES, TIER_COSTS)])
def test_the_schedule_of_several_tiers_is_that_of_brute_force(
    rates: tuple[float, ...], costs: tuple[float, ...]
) -> None:
    step_s, most = 20.0, 240
    levels = [
        Level(str(i), cost, rate, latency=cost * 30) for i, (rate, cost) in enumerate(zip(rates, costs, strict=True))
    ]
    found = best_schedule(levels, step_s, most)
    best = max(
        total_goodput(levels, [n * step_s for n in (a, b, c)])
        for a in range(1, most + 1)
        for b in range(a, most + 1, a)
        for c in range(b, most + 1, b)
        if all(n * step_s + level.cost >= level.latency for n, level in zip((a, b, c), levels, strict=True))
    )
    assert (1 - found.goodput) == pytest.approx(1 - best, rel=1e-3)
    near, middle, far = found.every
    assert far % middle == middle % near == 0


def test_one_tier_of_the_schedule_is_the_exact_minimum() -> None:
    level = Level("file", 5.0, 1 / 11_135)
    schedule = best_schedule([level], 0.1, 10**6)
    assert schedule.every[0] * 0.1 == pytest.approx(best_interval(5.0, 11_135), rel=1e-3)


def test_intervals_without_a_step_to_count_in_are_those_of_benoit() -> None:
    levels = [Level("memory", 0.1, 1e-5), Level("s3", 5.0, 1e-7)]
    assert [young(one.cost, one.mtbf) for one in levels] == [pytest.approx(one.best(), rel=1e-2) for one in levels]


def test_a_tier_that_nothing_falls_back_to_is_saved_as_rarely_as_the_run_is_long() -> None:
    schedule = best_schedule([Level("memory", 0.1, 1e-4), Level("s3", 5.0, 0.0)], 1.0, 1000)
    assert schedule.every == (40, 1000)  # 45 would be the first one's own best, and no divisor of the run


def test_a_tier_whose_copies_never_arrive_in_the_run_is_left_to_its_end() -> None:
    assert best_schedule([Level("s3", 1.0, 1e-4, latency=1e6)], 1.0, 1000).every == (1000,)


def test_nothing_to_schedule_is_said() -> None:
    for levels, step_s in (([], 1.0), ([Level("a", 1.0, 1.0)], 0.0)):
        with pytest.raises(ValueError, match="nothing to schedule"):
            best_schedule(levels, step_s, 10)
