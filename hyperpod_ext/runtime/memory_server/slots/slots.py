"""Chooses the next slot to write, and tracks existing snapshots. Pure functions, which read and write no shared memory.

    EMPTY -> WRITING -> SEALED -> REPLICATED -> DURABLE

The newest complete snapshot of a rank is never overwritten, so that a complete snapshot remains if the rank's process
dies while it writes the next one. A pinned slot is never overwritten, because its snapshot is being copied to another
tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from hyperpod_ext.runtime.snapshot.manifest import Manifest

MIN_SLOTS = 2
"""Minimum number of slots per rank: one with a complete snapshot, and one that is being written."""


class State(IntEnum):
    EMPTY = 0
    WRITING = 1
    SEALED = 2
    REPLICATED = 3
    DURABLE = 4


@dataclass(slots=True)
class Slot:
    """A part of a region that has room for one snapshot."""

    state: State = State.EMPTY
    sequence: int = -1
    """Number of the save that wrote the slot, counted over all ranks of the node. Unlike the step number, this number
    does not go back after a restore."""
    step: int = -1
    generation: int = 0
    save_id: str = ""
    manifest: Manifest = field(default_factory=dict)
    pins: set[str] = field(default_factory=set)
    """Names of the copies that have pinned the slot."""
    provisional: bool = False
    """Whether the rank must still confirm the snapshot, which is not copied before the rank has confirmed it."""
    promised: bool = False
    """Whether the rank may begin to write to the slot at any moment, so that no copy of the slot may begin."""

    @property
    def sealed(self) -> bool:
        return self.state >= State.SEALED


def pick_slot(slots: Sequence[Slot]) -> int | None:
    """Return the index of the slot to overwrite: a slot without a complete snapshot, or else the slot with the oldest
    snapshot. None if all slots are in use."""
    newest = newest_sealed(slots)
    free = [index for index, slot in enumerate(slots) if index != newest and not slot.pins]
    return min(free, key=lambda index: (slots[index].sealed, slots[index].sequence), default=None)


def may_write(slots: Sequence[Slot], index: int) -> bool:
    """Return True if the slot contains neither the newest complete snapshot nor a snapshot that is being copied, so
    that the slot may be overwritten."""
    return 0 <= index < len(slots) and index != newest_sealed(slots) and not slots[index].pins


def newest_sealed(slots: Sequence[Slot]) -> int | None:
    """Return the index of the slot that was sealed (completed) last; None if no slot is sealed."""
    sealed = [index for index, slot in enumerate(slots) if slot.sealed]
    return max(sealed, key=lambda index: slots[index].sequence, default=None)


def forget_newer(slots: Sequence[Slot], step: int, generation: int) -> None:
    """Drop snapshots of earlier generations after `step`, the step after which `generation` began.

    The dropped steps were abandoned, so they must not be restored, and must not hide the valid newest step.
    """
    for slot in slots:
        if slot.step > step and slot.generation < generation and slot.state is not State.EMPTY:
            slot.state, slot.manifest = State.EMPTY, {}
