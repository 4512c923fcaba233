"""Tunes the save interval of a running job, from the measured costs of saves and the number of failures. Pure.

The failure rate is estimated from the job's failures and from a prior rate, which counts as much as one failure. An
interval changes only if the change improves goodput noticeably, and at most by a factor of two at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hyperpod_ext.planner.intervals import best_interval
from hyperpod_ext.planner.rates import Rates, published

_STEADY = 1.15
"""Minimum factor by which an interval changes. A change by a smaller factor would change goodput by less than 1 % of
the cost of saves."""
_MOST = 2.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a running job for one tier."""

    elapsed: float
    """Seconds since the job began."""
    failures: int
    """Number of failures since the job began from which this tier recovered the job."""
    blocked: float
    """Mean seconds for which a save blocks training."""
    latency: float
    """Mean seconds from a snapshot until its copy has arrived in this tier."""


def prior_rates(nodes: int) -> Rates:
    """Return the failures per second that are expected for `nodes` nodes, from the published failures of a run."""
    return published("llama3-405b").of_job(nodes)


def believed_rate(failures: int, elapsed: float, prior: float) -> float:
    """Estimate the failures per second of a job from its failures so far and from a prior rate. The prior counts as one
    failure in 1 / `prior` seconds.

    Args:
        failures: number of failures in `elapsed` seconds.
        prior: failures per second that are expected without any measurement.

    Raises:
        ValueError: `prior` is not above 0, or `failures` or `elapsed` is negative.
    """
    if not prior > 0 or failures < 0 or elapsed < 0:
        raise ValueError(f"prior {prior}, {failures} failures in {elapsed} s are not valid for a rate")
    return (failures + 1) / (elapsed + 1 / prior)


def tune(interval: float, measured: Measured, prior: float) -> float:
    """Return the next save interval in seconds. Return `interval` unchanged if another interval would gain almost
    nothing.

    Args:
        interval: the current save interval in seconds.
        prior: failures per second that are expected without any measurement.

    Raises:
        ValueError: `interval` is not above 0.
    """
    if not (interval > 0 and math.isfinite(interval)):
        raise ValueError(f"an interval of {interval} s cannot be tuned; it must be above 0")
    mtbf = 1 / believed_rate(measured.failures, measured.elapsed, prior)
    best = best_interval(measured.blocked, mtbf, measured.latency)
    if best <= 0:
        return interval  # `blocked` is 0: saves have no measurable cost
    if max(best / interval, interval / best) < _STEADY:
        return interval
    return min(max(best, interval / _MOST), interval * _MOST)
