"""Best save intervals for given costs of saves and failures: exact solutions.

All times are in seconds. `interval` is the work between two saves, `cost` the training time of a save, and `mtbf` the
mean time between failures. Failures are independent (exponential times). A failure costs `restart` seconds, and all
work since the newest save that had arrived. A save arrives `latency` after it was taken. The share of time kept is then
exactly

    goodput = (interval / mtbf) * exp(-(latency + restart) / mtbf) / (exp((interval + cost) / mtbf) - 1)

and its maximum over `interval` depends on cost and mtbf alone (Daly 2006 for a synchronous save, latency 0; a save
that overlaps with training has latency and little cost, but starts after the one before has arrived).
"""

from __future__ import annotations

import math


def best_interval(cost: float, mtbf: float, latency: float = 0.0) -> float:
    """Return the work between saves with the greatest goodput: mtbf * (1 + W0(-exp(-(1 + cost / mtbf)))).

    The result is at least the time until a save arrives. The result is infinite without failures.
    """
    if math.isinf(mtbf):
        return math.inf
    return max(mtbf * _one_plus_w0(cost / mtbf), latency - cost, 0.0)


def _one_plus_w0(ratio: float) -> float:
    """Return 1 + W0(-exp(-(1 + ratio))): the y in (0, 1) with y + log(1 - y) + ratio = 0. Near 0 the terms of the form
    with W cancel, so the equation is solved for y."""
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
    """Return -(y + log(1 - y)) without cancellation."""
    if y > 0.05:
        return -(y + math.log1p(-y))
    total, power, n = 0.0, y * y, 2
    while power / n > 1e-18 * total or n == 2:
        total += power / n
        power, n = power * y, n + 1
    return total


def goodput(interval: float, cost: float, mtbf: float, *, latency: float = 0.0, restart: float = 0.0) -> float:
    """Return the share of time spent on kept work, from 0 to 1. The module's docstring has the formula.

    Raises:
        ValueError: an interval that is not positive, or another time below 0.
    """
    if not interval > 0 or min(cost, latency, restart) < 0 or not mtbf > 0:
        raise ValueError(
            f"interval {interval} and mtbf {mtbf} must be above 0, cost {cost}, latency {latency} and "
            f"restart {restart} not below it"
        )
    if math.isinf(mtbf):
        return 1.0 if math.isinf(interval) else interval / (interval + cost)
    period = (interval + cost) / mtbf
    if period > 700:  # every interval has a failure
        return 0.0
    return (interval / mtbf) * math.exp(-(latency + restart) / mtbf) / math.expm1(period)


def lost_per_failure(interval: float, cost: float, mtbf: float, *, latency: float = 0.0) -> float:
    """Return the mean seconds of work that one failure loses, which is the work since the newest save."""
    if math.isinf(mtbf) or math.isinf(interval):
        return math.inf if math.isinf(interval) and not math.isinf(mtbf) else 0.0
    done = mtbf * interval / (interval + cost)  # between two failures
    return max(0.0, done - mtbf * goodput(interval, cost, mtbf, latency=latency))
