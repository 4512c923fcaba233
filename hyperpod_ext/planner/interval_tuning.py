"""Tunes a running job's save interval by measured costs and failures. Pure.

Failures are counted on top of a prior worth one failure. An interval changes only if that improves goodput, and by at
most a factor of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hyperpod_ext.planner.intervals import best_interval
from hyperpod_ext.planner.rates import Rates, published

_STEADY = 1.15
"""Intervals that differ by less than this factor differ in goodput by less than 1 % of the cost of saves."""
_MOST = 2.0


@dataclass(frozen=True, slots=True)
class Measured:
    """A job's measurements for one tier, in seconds."""

    elapsed: float
    """Seconds since the job began."""
    failures: int
    """Failures that this tier recovered since the job began."""
    blocked: float
    """Mean time that a save blocks training."""
    latency: float
    """Mean time from a snapshot until its copy has arrived."""


def prior_rates(nodes: int) -> Rates:
    """Return the expected failures per second of this many nodes, from a published run."""
    return published("llama3-405b").of_job(nodes)


def believed_rate(failures: int, elapsed: float, prior: float) -> float:
    """Return failures per second: the counted failures, plus one failure in the time in which the prior expects one.

    Raises:
        ValueError: a prior that is not above 0, or a negative count or time.
    """
    if not prior > 0 or failures < 0 or elapsed < 0:
        raise ValueError(f"prior {prior}, {failures} failures in {elapsed} s are not valid for a rate")
    return (failures + 1) / (elapsed + 1 / prior)


def tune(interval: float, measured: Measured, prior: float) -> float:
    """Return the next interval in seconds; `interval` itself if another interval would gain almost nothing.

    Args:
        interval: the current interval.
        prior: expected failures per second before any were counted.

    Raises:
        ValueError: an interval that is not above 0.
    """
    if not (interval > 0 and math.isfinite(interval)):
        raise ValueError(f"an interval of {interval} s cannot be tuned; it must be above 0")
    mtbf = 1 / believed_rate(measured.failures, measured.elapsed, prior)
    best = best_interval(measured.blocked, mtbf, measured.latency)
    if best <= 0:
        return interval  # saves have no measurable cost
    if max(best / interval, interval / best) < _STEADY:
        return interval
    return min(max(best, interval / _MOST), interval * _MOST)
