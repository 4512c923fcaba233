"""Positions of a run in its data, and the micro-batches (slots) of each rank. The world size only maps slots to ranks.

These functions are pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of the next step in the data."""

    epoch: int = 0
    place: int = 0
    """Number of samples of this epoch that earlier steps have used."""
    step: int = 0
    """Number of steps made so far, over all epochs."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The places of one global batch: `count` places from `start` on."""

    start: int
    count: int


GHOST = -1
"""Index of an extra slot that only exists so that every rank has equally many slots. Its loss does not count."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One micro-batch of a step."""

    index: int
    """Number of the slot in the step, the same for any world size. GHOST for an extra slot, which does not count."""
    ids: list[int]
    """Numbers of the slot's samples, in order."""
    weight: float
    """Slot's share of the step's samples; 0.0 for a ghost. Multiply the slot's mean loss by the weight, and sum over
    all slots."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, with the slots of this rank."""

    cursor: Cursor
    """Position of this step in the data."""
    after: Cursor
    """Position of the next step in the data."""
    extent: Extent
    """Places of the step's samples, over all ranks."""
    slots: list[Slot]
    """Slots of this rank."""
    version: int
    """Version of the sampler when it made the plan."""


def extent_at(cursor: Cursor, length: int | None, batch: int, drop_last: bool) -> tuple[Cursor, Extent]:
    """Return the places of the next step's samples, and the cursor with the epoch of those places.

    If the cursor's epoch has too few samples left, the step is the first of the next epoch.

    `length`: number of samples in an epoch; None if the data is endless. A step never crosses the end of an epoch.
    """
    if length is None:
        return cursor, Extent(cursor.place, batch)
    left = length - cursor.place
    if left < (batch if drop_last else 1):
        cursor, left = Cursor(cursor.epoch + 1, 0, cursor.step), length
    return cursor, Extent(cursor.place, min(batch, left))


def after(cursor: Cursor, extent: Extent, length: int | None, batch: int, drop_last: bool) -> Cursor:
    """Return the cursor after the step at `cursor`. After the last step of an epoch, the cursor is (epoch + 1, place
    0)."""
    place = extent.start + extent.count
    if length is not None and length - place < (batch if drop_last else 1):
        return Cursor(cursor.epoch + 1, 0, cursor.step + 1)
    return Cursor(cursor.epoch, place, cursor.step + 1)


def steps_per_epoch(length: int, batch: int, drop_last: bool) -> int:
    """Return the number of steps in a whole epoch."""
    return length // batch if drop_last else -(-length // batch)


def slots_of(count: int, micro: int) -> int:
    """Return the number of micro-batches for `count` samples. The last micro-batch may be smaller."""
    return -(-count // micro)


def owned(slots: int, rank: int, world_size: int) -> range:
    """Return the range of this rank's slots. The number of slots differs by at most one between ranks."""
    return range(rank * slots // world_size, (rank + 1) * slots // world_size)


def most_owned(slots: int, world_size: int) -> int:
    """Return the largest number of slots of any rank. The rank with most slots determines the duration of a step."""
    return -(-slots // world_size)
