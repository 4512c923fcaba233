"""Which steps go to the log: those of sampled ranks, and what a script logs, of the lowest rank that logs it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from hyperpod_ext.runtime.events.of_training import Step, is_sampled

_OWN = frozenset(Step.model_fields)
"""Fields that a step has by itself; others are the script's numbers."""


class StepSampler:
    """Of one job; who logs numbers may be another rank in each generation."""

    def __init__(self) -> None:
        self._generation, self._lowest = -1, 0

    def takes(self, rank: int, generation: int, fields: Iterable[str]) -> bool:
        """Whether a step that `rank` has made goes to the log. `fields`: names of what it reports of it."""
        has_numbers = any(name not in _OWN for name in fields)
        if has_numbers and (generation != self._generation or rank <= self._lowest):
            self._generation, self._lowest = generation, rank
            return True
        return is_sampled(rank)
