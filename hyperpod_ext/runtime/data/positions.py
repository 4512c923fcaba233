"""Positions of a run in its data, and the micro-batches (slots) of each rank. The world size only affects which rank
gets which slot.

All functions in this module are pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of the next step in the data."""

    epoch: int = 0
    place: int = 0
    """Number of samples of the epoch that earlier steps have used."""
    step: int = 0
    """Number of steps made so far, over all epochs."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The positions (places) of one global batch in an epoch: `count` positions from `start` on."""

    start: int
    count: int


GHOST = -1
"""Index of every ghost: an extra slot whose loss does not count, added so that all ranks have equally many slots."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One micro-batch of a step."""

    index: int
    """Number of the slot in the step, independent of the world size; GHOST for an extra slot, which does not count."""
    ids: list[int]
    """Numbers of the samples in the slot, in order."""
    weight: float
    """Share of the step's samples that are in the slot; 0.0 for a ghost. A step's loss is the weighted sum of the
    slots' mean losses."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, with the slots of this rank."""

    cursor: Cursor
    """Position of this step in the data."""
    after: Cursor
    """Position of the next step in the data."""
    extent: Extent
    """Positions of the step's samples in the epoch, over all ranks."""
    slots: list[Slot]
    """Slots (micro-batches) of this rank."""
    version: int
    """Version of the sampler's settings when it made the plan."""


def extent_at(cursor: Cursor, length: int | None, batch: int, drop_last: bool) -> tuple[Cursor, Extent]:
    """Return a cursor with the epoch of the next step, and the positions of the step's samples in this epoch.

    If the epoch of `cursor` has too few samples left, the next step is the first step of the next epoch.

    `length`: number of samples in an epoch; None if the data is endless. A step never crosses the end of an epoch.
    """
    if length is None:
        return cursor, Extent(cursor.place, batch)
    left = length - cursor.place
    if left < (batch if drop_last else 1):
        cursor, left = Cursor(cursor.epoch + 1, 0, cursor.step), length
    return cursor, Extent(cursor.place, min(batch, left))


def after(cursor: Cursor, extent: Extent, length: int | None, batch: int, drop_last: bool) -> Cursor:
    """Return the cursor after the step at `cursor`. After an epoch's last step, the cursor is at place 0 of the next
    epoch."""
    place = extent.start + extent.count
    if length is not None and length - place < (batch if drop_last else 1):
        return Cursor(cursor.epoch + 1, 0, cursor.step + 1)
    return Cursor(cursor.epoch, place, cursor.step + 1)


def steps_per_epoch(length: int, batch: int, drop_last: bool) -> int:
    """Return the number of steps in an epoch of `length` samples."""
    return length // batch if drop_last else -(-length // batch)


def slots_of(count: int, micro: int) -> int:
    """Return the number of micro-batches for `count` samples. The last micro-batch may be smaller."""
    return -(-count // micro)


def owned(slots: int, rank: int, world_size: int) -> range:
    """Return the range of a rank's slots in a step. The number of slots differs by at most one between ranks."""
    return range(rank * slots // world_size, (rank + 1) * slots // world_size)


def most_owned(slots: int, world_size: int) -> int:
    """Return the number of slots of the rank with the most slots, which determines the duration of a step."""
    return -(-slots // world_size)
