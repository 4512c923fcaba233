"""Positions of a run in its data, and the slots of each rank. Pure arithmetic. The world size only maps slots to
ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of the next step."""

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
"""Index of a slot whose only purpose is that every rank has equally many slots."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One micro-batch of a step."""

    index: int
    """Number of the slot in the step, the same for any world size. GHOST for a slot that does not count."""
    ids: list[int]
    """The slot's samples, in order."""
    weight: float
    """Share of the step's samples; 0.0 for a ghost. Multiply the mean loss of the slot by it, and sum over slots."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, as this rank makes it."""

    cursor: Cursor
    """Position of the step."""
    after: Cursor
    """Position of the next step."""
    extent: Extent
    """Places of the step's samples, over all ranks."""
    slots: list[Slot]
    """Slots of this rank."""
    version: int
    """Version of the sampler that made the plan."""


def extent_at(cursor: Cursor, length: int | None, batch: int, drop_last: bool) -> tuple[Cursor, Extent]:
    """Return the next step's samples, and the cursor with their epoch. If this epoch has no samples left, that is the
    next.

    `length`: number of samples in an epoch; None if endless. A step never crosses the end of an epoch.
    """
    if length is None:
        return cursor, Extent(cursor.place, batch)
    left = length - cursor.place
    if left < (batch if drop_last else 1):
        cursor, left = Cursor(cursor.epoch + 1, 0, cursor.step), length
    return cursor, Extent(cursor.place, min(batch, left))


def after(cursor: Cursor, extent: Extent, length: int | None, batch: int, drop_last: bool) -> Cursor:
    """Return the cursor after the step at `cursor`. At the end of an epoch it is (epoch + 1, 0)."""
    place = extent.start + extent.count
    if length is not None and length - place < (batch if drop_last else 1):
        return Cursor(cursor.epoch + 1, 0, cursor.step + 1)
    return Cursor(cursor.epoch, place, cursor.step + 1)


def steps_per_epoch(length: int, batch: int, drop_last: bool) -> int:
    """Return the number of steps in a whole epoch."""
    return length // batch if drop_last else -(-length // batch)


def slots_of(count: int, micro: int) -> int:
    """Return the number of micro-batches for `count` samples. The last one may be smaller."""
    return -(-count // micro)


def owned(slots: int, rank: int, world_size: int) -> range:
    """Return this rank's consecutive slots. Their number differs by at most one between ranks."""
    return range(rank * slots // world_size, (rank + 1) * slots // world_size)


def most_owned(slots: int, world_size: int) -> int:
    """Return the largest number of slots that any rank has, which is the duration of a step in micro-batches."""
    return -(-slots // world_size)
