"""Intervals of several tiers: each failure falls back to the nearest tier that survived it.

Each tier has its own rate of failures, cost and interval. Goodput is the product of the goodputs of single tiers
(`intervals.goodput`). This is exact for one tier, and correct to first order for several. Each tier's interval
therefore has its own exact optimum. The best whole steps, with each interval a multiple of the one before, are found by
search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hyperpod_ext.planner.intervals import best_interval, goodput


@dataclass(frozen=True, slots=True)
class Level:
    """One tier with its costs in seconds, and failures per second of the whole job."""

    name: str
    cost: float
    """Training time that a save takes."""
    rate: float
    """Failures per second that no nearer tier survives."""
    latency: float = 0.0
    """Seconds from a save until it can be restored."""
    restart: float = 0.0
    """Seconds from a failure until training resumes, without lost work."""

    @property
    def mtbf(self) -> float:
        """Mean time between the tier's failures; infinite without failures."""
        return 1 / self.rate if self.rate > 0 else math.inf

    def best(self) -> float:
        """Return the tier's best work between saves, regardless of other tiers."""
        return best_interval(self.cost, self.mtbf, self.latency)

    def goodput(self, interval: float) -> float:
        """Return the share of time that this tier leaves to training."""
        return goodput(interval, self.cost, self.mtbf, latency=self.latency, restart=self.restart)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps between the saves of each tier, nearest first. Each is a multiple of the previous one."""

    every: tuple[int, ...]
    goodput: float


def total_goodput(levels: Sequence[Level], intervals: Sequence[float]) -> float:
    """Return the share of kept time with these intervals."""
    return math.prod(level.goodput(interval) for level, interval in zip(levels, intervals, strict=True))


def best_schedule(levels: Sequence[Level], step_s: float, most_steps: int) -> Schedule:
    """Return the nested schedule with the greatest goodput, in whole steps of `step_s` seconds, up to `most_steps`.

    A branch is cut if even the best values of its other tiers would recover less than one part in 5,000 of the loss.
    After 50,000 schedules, the best schedule so far is returned.

    Raises:
        ValueError: no tier, or a step that takes no time.
    """
    if not levels or not step_s > 0 or most_steps < 1:
        raise ValueError(
            f"{len(levels)} tiers, steps of {step_s} s, at most {most_steps} steps: there is nothing to schedule"
        )
    merged, carried = _merge_idle(levels)
    found = _Search(merged, step_s, most_steps).run()
    every = tuple(steps for steps, count in zip(found, carried, strict=True) for _ in range(count))
    return Schedule(every, total_goodput(levels, [steps * step_s for steps in every]))


def _merge_idle(levels: Sequence[Level]) -> tuple[list[Level], list[int]]:
    """Merge each tier without failures with the next one. Also returns the number of tiers in each result."""
    merged: list[Level] = []
    carried: list[int] = []
    waiting: list[Level] = []
    for level in levels:
        waiting.append(level)
        if level.rate > 0 or level is levels[-1]:
            cost, latency = sum(one.cost for one in waiting), max(one.latency for one in waiting)
            merged.append(Level(level.name, cost, level.rate, latency, level.restart))
            carried.append(len(waiting))
            waiting = []
    return merged, carried


_GAIN = 2e-4
"""Minimum gain of a better schedule, as a share of the loss."""

_MOST = 50_000
"""Maximum number of schedules to evaluate. Cheap tiers have very many similar schedules."""


class _Search:
    """Branch and bound over nested schedules. The nearest tier is chosen first."""

    def __init__(self, levels: Sequence[Level], step_s: float, most_steps: int) -> None:
        self._levels, self._step_s, self._most = levels, step_s, most_steps
        self._alone = [min(max(level.best() / step_s, 1.0), float(most_steps)) for level in levels]
        peaks = [self._log(index, alone) for index, alone in enumerate(self._alone)]
        self._bounds = [sum(peaks[index:]) for index in range(len(levels) + 1)]
        self._best: tuple[float, tuple[int, ...]] = (-math.inf, ())
        self._left = _MOST

    def run(self) -> tuple[int, ...]:
        """Return the steps of each tier."""
        self._extend((), 0.0)
        return self._best[1] or (self._most,) * len(self._levels)  # no save arrives within the whole run

    def _log(self, index: int, steps: float) -> float:
        level = self._levels[index]
        if steps * self._step_s + level.cost < level.latency * (1 - 1e-9):
            return -math.inf  # the previous save has not arrived when the next save is due
        kept = level.goodput(steps * self._step_s)
        return math.log(kept) if kept > 0 else -math.inf

    def _extend(self, chosen: tuple[int, ...], so_far: float) -> None:
        index = len(chosen)
        if index == len(self._levels):
            if so_far > self._best[0] or (so_far == self._best[0] and chosen > self._best[1]):
                self._best = (so_far, chosen)
            return
        unit = chosen[-1] if chosen else 1
        most = max(1, self._most // unit)
        centre = min(max(1, round(self._alone[index] / unit)), most)
        # goodput falls to both sides of the tier's own optimum, so each side ends where the bound does
        for multiples in (range(centre, 0, -1), range(centre + 1, most + 1)):
            for multiple in multiples:
                value, self._left = self._log(index, unit * multiple), self._left - 1
                if self._left < 0 and self._best[1]:
                    return
                if so_far + value + self._bounds[index + 1] <= self._best[0] * (1 - _GAIN) and not self._still_rising(
                    index, unit * multiple, multiples.step
                ):
                    break
                self._extend((*chosen, unit * multiple), so_far + value)

    def _still_rising(self, index: int, steps: int, direction: int) -> bool:
        """Return whether the tier's optimum is further in this direction."""
        return steps < self._alone[index] if direction > 0 else steps > self._alone[index] + 1
