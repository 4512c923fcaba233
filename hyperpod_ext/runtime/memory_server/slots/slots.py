"""Chooses the next slot to write, and tracks the state of each slot. No function here reads or writes shared memory.

    EMPTY -> WRITING -> SEALED -> REPLICATED -> DURABLE

The newest complete snapshot of a rank is never overwritten, so that this snapshot remains if the rank's process dies
while writing the next snapshot. A pinned slot is never overwritten, because its snapshot is being copied to another
tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from hyperpod_ext.runtime.snapshot.manifest import Manifest

MIN_SLOTS = 2
"""Minimum number of slots per rank: one slot with a complete snapshot, and one slot that is being written."""


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
    """Number of the save that wrote the slot, counted over all ranks of the node. Unlike the step number, the save
    number never decreases."""
    step: int = -1
    generation: int = 0
    save_id: str = ""
    manifest: Manifest = field(default_factory=dict)
    pins: set[str] = field(default_factory=set)
    """Names of the copies that have pinned the slot."""
    provisional: bool = False
    """Whether the rank must still confirm the snapshot before it may be copied."""
    promised: bool = False
    """Whether the slot is assigned to the rank's next save, which may begin at any moment. No copy of the slot may
    begin."""

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
    """Return whether a slot may be overwritten: it has neither the newest complete snapshot nor a pinned snapshot."""
    return 0 <= index < len(slots) and index != newest_sealed(slots) and not slots[index].pins


def newest_sealed(slots: Sequence[Slot]) -> int | None:
    """Return the index of the slot that was sealed (completed) last; None if no slot is sealed."""
    sealed = [index for index, slot in enumerate(slots) if slot.sealed]
    return max(sealed, key=lambda index: slots[index].sequence, default=None)


def forget_newer(slots: Sequence[Slot], step: int, generation: int) -> None:
    """Drop earlier generations' snapshots of steps after `step`, the step after which `generation` begins.

    The job has gone back to `step`, so later steps must not be restored or count as the newest step.
    """
    for slot in slots:
        if slot.step > step and slot.generation < generation and slot.state is not State.EMPTY:
            slot.state, slot.manifest = State.EMPTY, {}
