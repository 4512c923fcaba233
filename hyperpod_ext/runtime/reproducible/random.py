"""Random numbers that belong to a micro-batch, whichever rank computes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hyperpod_ext.runtime.state.seeding import seed_step

if TYPE_CHECKING:
    from hyperpod_ext.runtime.data.loader import Step


def seeded(step: Step, seed: int) -> Iterator[tuple[Any, float]]:
    """(micro-batch, weight) of `step`, as by iterating it; before each, torch's, Python's and numpy's global generators
    are set from (seed, step, slot), so that dropout draws the same on any rank."""
    for slot, (batch, weight) in zip(step.slots, step, strict=True):
        seed_step(seed, step.number, -2 - slot.index)  # ranks count from 0, and -1 is taken for building
        yield batch, weight
