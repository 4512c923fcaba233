"""Where a run is in its data, and which rank reads what: pure arithmetic. World size decides only slot -> rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cursor:
    """The next step to be made."""

    epoch: int = 0
    place: int = 0
    """Samples of this epoch that steps before have used."""
    step: int = 0
    """Steps made so far, over all epochs."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Samples of one global batch: `count` places from `start` on."""

    start: int
    count: int


GHOST = -1
"""Index of a slot that is there only so that every rank has as many."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One micro-batch of a step."""

    index: int
    """Its number in the step, the same for any world size; GHOST when it counts for nothing."""
    ids: list[int]
    """Its samples, in order."""
    weight: float
    """Share of the step's samples that it has; 0.0 for a ghost. Multiply its mean loss by it, and sum over slots."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, as this rank makes it."""

    cursor: Cursor
    """Where it begins."""
    after: Cursor
    """Where the next one begins."""
    extent: Extent
    """Its samples, over all ranks."""
    slots: list[Slot]
    """What this rank reads."""
    version: int
    """Of the sampler that it was made by."""


def extent_at(cursor: Cursor, length: int | None, batch: int, drop_last: bool) -> tuple[Cursor, Extent]:
    """The next step's samples, and the cursor with the epoch that they are in: the one asked about, or, where that
    has none left, the next. `length` is that of an epoch; None: endless. A step never crosses the end of an epoch."""
    if length is None:
        return cursor, Extent(cursor.place, batch)
    left = length - cursor.place
    if left < (batch if drop_last else 1):
        cursor, left = Cursor(cursor.epoch + 1, 0, cursor.step), length
    return cursor, Extent(cursor.place, min(batch, left))


def after(cursor: Cursor, extent: Extent, length: int | None, batch: int, drop_last: bool) -> Cursor:
    """The cursor when the step that begins at `cursor` has been made. A whole epoch is (epoch + 1, 0)."""
    place = extent.start + extent.count
    if length is not None and length - place < (batch if drop_last else 1):
        return Cursor(cursor.epoch + 1, 0, cursor.step + 1)
    return Cursor(cursor.epoch, place, cursor.step + 1)


def steps_per_epoch(length: int, batch: int, drop_last: bool) -> int:
    """Steps of a whole epoch."""
    return length // batch if drop_last else -(-length // batch)


def slots_of(count: int, micro: int) -> int:
    """Micro-batches that `count` samples make; the last may be smaller."""
    return -(-count // micro)


def owned(slots: int, rank: int, world_size: int) -> range:
    """Slots of this rank: consecutive, and as many as any other's, give or take one."""
    return range(rank * slots // world_size, (rank + 1) * slots // world_size)


def most_owned(slots: int, world_size: int) -> int:
    """Slots of the rank that has most: what a step takes, in micro-batches."""
    return -(-slots // world_size)
