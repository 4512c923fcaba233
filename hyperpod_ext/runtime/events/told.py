"""Whose steps a log has: every rank's in most jobs, some ranks' in a large one. Pure.

8,192 ranks would write a megabyte at each step, and nobody could read what a month of that has come to.
"""

from __future__ import annotations

from collections.abc import Iterable

from hyperpod_ext.runtime.events.of_training import Step

ALL_UP_TO = 64
"""Ranks from 0 on whose steps are all told."""
ONE_IN = 129
"""Of the others. Odd: ranks of each number on their nodes are among them."""


def tells_steps(rank: int) -> bool:
    """Whether the steps of `rank` are told."""
    return rank < ALL_UP_TO or rank % ONE_IN == 0


def telling_ranks(world_size: int) -> int:
    """How many of a job's ranks tell their steps."""
    return min(world_size, ALL_UP_TO) + max(0, world_size - 1) // ONE_IN


class ToldSteps:
    """What goes to the log: steps of ranks that tell theirs; what a script logs, of the lowest rank that logs it."""

    def __init__(self) -> None:
        self._generation, self._logs = -1, 0

    def takes(self, rank: int, generation: int, fields: Iterable[str]) -> bool:
        """Whether a step is told that `rank` has made. `fields`: names of what it reports of it."""
        logs = any(name not in Step.model_fields for name in fields)
        if logs and (generation != self._generation or rank <= self._logs):
            self._generation, self._logs = generation, rank
            return True
        return tells_steps(rank)
