"""How a running job changes its own interval: from what saves cost it and how often it failed. Pure.

What is measured is believed more the more of it there is: failures are counted on top of a prior that is worth one
failure, and an interval is changed only when that gains something, and at most by a factor of two at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hyperpod_ext.planner.intervals import best_interval
from hyperpod_ext.planner.rates import Rates, published

_STEADY = 1.15
"""Intervals that differ by less than this factor differ in goodput by less than a hundredth of what saves cost."""
_MOST = 2.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What a job knows of itself, for one tier. Seconds."""

    elapsed: float
    """Since the job began."""
    failures: int
    """Of those that fall back to this tier, since then."""
    blocked: float
    """What one save took from training: mean of what was measured."""
    latency: float
    """From a snapshot until it had arrived: mean of what was measured."""


def prior_rates(nodes: int) -> Rates:
    """Failures per second to expect of so many nodes before anything was seen: those of a published run."""
    return published("llama3-405b").of_job(nodes)


def believed_rate(failures: int, elapsed: float, prior: float) -> float:
    """Failures per second: those seen, and one more in the time in which the prior expects one.

    Raises:
        ValueError: a prior that is not above 0, or a negative count or time.
    """
    if not prior > 0 or failures < 0 or elapsed < 0:
        raise ValueError(f"prior {prior}, {failures} failures in {elapsed} s: a rate cannot follow from these")
    return (failures + 1) / (elapsed + 1 / prior)


def tune(interval: float, measured: Measured, prior: float) -> float:
    """The interval to go on with, in seconds: `interval` itself where another would gain next to nothing.

    Args:
        interval: what it is now.
        prior: failures per second that are expected before any were seen.

    Raises:
        ValueError: an interval that is not above 0.
    """
    if not (interval > 0 and math.isfinite(interval)):
        raise ValueError(f"an interval of {interval} s cannot be improved on")
    mtbf = 1 / believed_rate(measured.failures, measured.elapsed, prior)
    best = best_interval(measured.blocked, mtbf, measured.latency)
    if best <= 0:
        return interval  # saves cost nothing that could be measured: nothing to weigh
    if max(best / interval, interval / best) < _STEADY:
        return interval
    return min(max(best, interval / _MOST), interval * _MOST)
