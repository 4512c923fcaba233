"""Chooses the next slot to write, and tracks existing snapshots. Pure functions, which touch no memory.

    EMPTY -> WRITING -> SEALED -> REPLICATED -> DURABLE

The newest complete slot of an owner is never overwritten, so that no complete snapshot is lost if a writer dies
halfway. A pinned slot is never overwritten either, because it is being copied to another tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from hyperpod_ext.runtime.snapshot.manifest import Manifest

MIN_SLOTS = 2
"""Minimum number of slots: one complete slot, and one that is being written."""


class State(IntEnum):
    EMPTY = 0
    WRITING = 1
    SEALED = 2
    REPLICATED = 3
    DURABLE = 4


@dataclass(slots=True)
class Slot:
    """A place for one snapshot."""

    state: State = State.EMPTY
    sequence: int = -1
    """Increased by one with each save of the owner. Unlike the step number, the sequence never goes back after a
    restore."""
    step: int = -1
    generation: int = 0
    save_id: str = ""
    manifest: Manifest = field(default_factory=dict)
    pins: set[str] = field(default_factory=set)
    """Names of the copies that have pinned the slot."""
    provisional: bool = False
    """Whether the owner must still confirm the snapshot, which is not copied before that."""
    promised: bool = False
    """Whether the owner may begin to write the slot at any moment, so that it cannot be copied."""

    @property
    def sealed(self) -> bool:
        return self.state >= State.SEALED


def pick_slot(slots: Sequence[Slot]) -> int | None:
    """Return the index of the slot to overwrite: an unfinished slot, or else the oldest. None if all slots are in
    use."""
    newest = newest_sealed(slots)
    free = [index for index, slot in enumerate(slots) if index != newest and not slot.pins]
    return min(free, key=lambda index: (slots[index].sealed, slots[index].sequence), default=None)


def may_write(slots: Sequence[Slot], index: int) -> bool:
    """Return whether the slot contains neither the newest complete snapshot nor one that is being copied."""
    return 0 <= index < len(slots) and index != newest_sealed(slots) and not slots[index].pins


def newest_sealed(slots: Sequence[Slot]) -> int | None:
    """Return the index of the slot that was sealed last; None if none is sealed."""
    sealed = [index for index, slot in enumerate(slots) if slot.sealed]
    return max(sealed, key=lambda index: slots[index].sequence, default=None)


def forget_newer(slots: Sequence[Slot], step: int, generation: int) -> None:
    """Drop snapshots of earlier generations after `step`, where this generation began.

    Abandoned steps must neither be restored nor hide the valid step.
    """
    for slot in slots:
        if slot.step > step and slot.generation < generation and slot.state is not State.EMPTY:
            slot.state, slot.manifest = State.EMPTY, {}
