"""Computes the best save intervals for several tiers. After a failure, state is restored from the nearest tier that
survived the failure.

Each tier has its own failure rate, save cost and save interval. The goodput of the job is computed as the product of
the goodputs of single tiers (`intervals.goodput`), which is exact for one tier and correct to first order for several
tiers. With a product of goodputs, the best interval of a tier does not depend on other tiers. A search then finds the
best intervals in whole steps, where the interval of each tier must be a multiple of the interval of the next nearer
tier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hyperpod_ext.planner.intervals import best_interval, goodput


@dataclass(frozen=True, slots=True)
class Level:
    """One tier with the cost of its saves, and with the rate of the failures that the tier recovers."""

    name: str
    cost: float
    """Training time in seconds that a save to this tier takes."""
    rate: float
    """Failures per second of the whole job that this tier survives, and that no nearer tier survives."""
    latency: float = 0.0
    """Seconds from the start of a save until the save can be restored."""
    restart: float = 0.0
    """Seconds from a failure until training resumes. The time to repeat lost steps is not included."""

    @property
    def mtbf(self) -> float:
        """Mean seconds between failures that this tier recovers; infinite if `rate` is 0."""
        return 1 / self.rate if self.rate > 0 else math.inf

    def best(self) -> float:
        """Return the best interval between saves to this tier in seconds, regardless of other tiers."""
        return best_interval(self.cost, self.mtbf, self.latency)

    def goodput(self, interval: float) -> float:
        """Return the share of time that would be spent on kept work if this were the only tier."""
        return goodput(interval, self.cost, self.mtbf, latency=self.latency, restart=self.restart)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Numbers of steps between saves for several tiers, and the resulting goodput.

    `every` has one number for each tier, nearest tier first. Each number is a multiple of the preceding number.
    """

    every: tuple[int, ...]
    goodput: float


def total_goodput(levels: Sequence[Level], intervals: Sequence[float]) -> float:
    """Return the goodput of a job whose tiers have the given intervals between saves, in seconds."""
    return math.prod(level.goodput(interval) for level, interval in zip(levels, intervals, strict=True))


def best_schedule(levels: Sequence[Level], step_s: float, most_steps: int) -> Schedule:
    """Return the schedule with the greatest goodput. Each tier's number of steps is a multiple of the number of the
    next nearer tier.

    The search skips schedules that can improve on the best schedule so far by less than 1/5,000 of the lost time. After
    50,000 schedules, the search ends and returns the best schedule so far.

    Args:
        levels: the tiers, nearest first.
        step_s: seconds of one training step.
        most_steps: maximum number of steps between two saves.

    Raises:
        ValueError: there is no tier, or a step takes no time.
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
    """Merge each tier whose failure rate is 0 with the next tier.

    Returns:
        The merged tiers, and for each of them the number of original tiers.
    """
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
"""Minimum gain for which the search continues, as a share of the time that the best schedule so far loses."""

_MOST = 50_000
"""Maximum number of evaluations in a search. The limit is needed because tiers with cheap saves have very many similar
schedules."""


class _Search:
    """Branch-and-bound search over schedules. The search first chooses the steps of the nearest tier."""

    def __init__(self, levels: Sequence[Level], step_s: float, most_steps: int) -> None:
        self._levels, self._step_s, self._most = levels, step_s, most_steps
        self._alone = [min(max(level.best() / step_s, 1.0), float(most_steps)) for level in levels]
        peaks = [self._log(index, alone) for index, alone in enumerate(self._alone)]
        self._bounds = [sum(peaks[index:]) for index in range(len(levels) + 1)]
        self._best: tuple[float, tuple[int, ...]] = (-math.inf, ())
        self._left = _MOST

    def run(self) -> tuple[int, ...]:
        """Return the best number of steps between saves for each tier."""
        self._extend((), 0.0)
        return self._best[1] or (self._most,) * len(self._levels)  # no schedule found: no save arrives within the run

    def _log(self, index: int, steps: float) -> float:
        level = self._levels[index]
        if steps * self._step_s + level.cost < level.latency * (1 - 1e-9):
            return -math.inf  # the next save would be due before the previous save arrives
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
        # goodput falls on both sides of the tier's own optimum, so the bound ends the search on each side
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
        """Return whether the tier's own optimum is further in the search direction than `steps`."""
        return steps < self._alone[index] if direction > 0 else steps > self._alone[index] + 1
