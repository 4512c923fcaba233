"""Computes the best interval between saves for a given cost of saves and a given rate of failures. The solution is
exact.

All times are in seconds. `interval` is the training time between two saves, `cost` is the training time that a save
takes, and `mtbf` is the mean time between failures. Failures are independent: the times between them have an
exponential distribution. A failure costs `restart` seconds, and all work since the newest save that had arrived in its
tier. A save arrives `latency` seconds after it was started. The exact goodput, which is the share of time that is spent
on kept work, is

    goodput = (interval / mtbf) * exp(-(latency + restart) / mtbf) / (exp((interval + cost) / mtbf) - 1)

The interval with the greatest goodput depends only on `cost` and `mtbf`. Daly (2006) gives the best interval for a
synchronous save, for which `latency` is 0. A save that overlaps with training has a latency but little cost. A save
that overlaps with training can start only after the previous save has arrived.
"""

from __future__ import annotations

import math


def best_interval(cost: float, mtbf: float, latency: float = 0.0) -> float:
    """Return the interval between saves with the greatest goodput: mtbf * (1 + W0(-exp(-(1 + cost / mtbf)))).

    The interval is at least `latency` - `cost`, because a save can start only after the previous save has arrived. The
    interval is infinite if `mtbf` is infinite.
    """
    if math.isinf(mtbf):
        return math.inf
    return max(mtbf * _one_plus_w0(cost / mtbf), latency - cost, 0.0)


def _one_plus_w0(ratio: float) -> float:
    """Return 1 + W0(-exp(-(1 + ratio))), where W0 is the Lambert W function. The result y in (0, 1) solves
    `y + log(1 - y) = -ratio`. Evaluating W0 directly would lose precision near 0."""
    if ratio <= 0:
        return 0.0
    if ratio > 30:
        return -math.expm1(-1 - ratio)
    y = min(math.sqrt(2 * ratio), 1 - math.exp(-1 - ratio) / 2)
    for _ in range(100):
        error = ratio - _minus_log_rest(y)
        after = y + error * (1 - y) / y  # Newton's method: the derivative is -y / (1 - y)
        after = min(max(after, y / 4), 1 - (1 - y) / 4)
        if abs(after - y) <= 1e-15 * y:
            return after
        y = after
    return y


def _minus_log_rest(y: float) -> float:
    """Return -(y + log(1 - y)) without loss of precision for small y."""
    if y > 0.05:
        return -(y + math.log1p(-y))
    total, power, n = 0.0, y * y, 2
    while power / n > 1e-18 * total or n == 2:
        total += power / n
        power, n = power * y, n + 1
    return total


def goodput(interval: float, cost: float, mtbf: float, *, latency: float = 0.0, restart: float = 0.0) -> float:
    """Return the goodput: the share of time that is spent on kept work, from 0 to 1. The module's docstring has the
    formula for the goodput.

    Raises:
        ValueError: `interval` or `mtbf` is not above 0, or another time is negative.
    """
    if not interval > 0 or min(cost, latency, restart) < 0 or not mtbf > 0:
        raise ValueError(
            f"interval {interval} and mtbf {mtbf} must be above 0, cost {cost}, latency {latency} and "
            f"restart {restart} not below it"
        )
    if math.isinf(mtbf):
        return 1.0 if math.isinf(interval) else interval / (interval + cost)
    period = (interval + cost) / mtbf
    if period > 700:  # the goodput is almost 0, because every interval has a failure; `expm1` would overflow
        return 0.0
    return (interval / mtbf) * math.exp(-(latency + restart) / mtbf) / math.expm1(period)


def lost_per_failure(interval: float, cost: float, mtbf: float, *, latency: float = 0.0) -> float:
    """Return the mean seconds of work that one failure loses, which is the work since the newest save that arrived."""
    if math.isinf(mtbf) or math.isinf(interval):
        return math.inf if math.isinf(interval) and not math.isinf(mtbf) else 0.0
    done = mtbf * interval / (interval + cost)  # mean seconds of work between two failures
    return max(0.0, done - mtbf * goodput(interval, cost, mtbf, latency=latency))
