"""Choose the next slot to write, and track existing snapshots. Pure: no memory is touched here.

    EMPTY -> WRITING -> SEALED -> REPLICATED -> DURABLE

The newest complete slot of an owner is never overwritten, so that a writer that dies halfway loses no complete
snapshot. Nor is a pinned slot, which is being copied to another tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from hyperpod_ext.runtime.snapshot.manifest import Manifest

MIN_SLOTS = 2
"""One complete slot, and one being written."""


class State(IntEnum):
    EMPTY = 0
    WRITING = 1
    SEALED = 2
    REPLICATED = 3
    DURABLE = 4


@dataclass(slots=True)
class Slot:
    """The place of one snapshot."""

    state: State = State.EMPTY
    sequence: int = -1
    """Incremented with each save of the owner; unlike the step number, it never goes back after a restore."""
    step: int = -1
    generation: int = 0
    save_id: str = ""
    manifest: Manifest = field(default_factory=dict)
    pins: set[str] = field(default_factory=set)
    """Pins of running copies."""
    provisional: bool = False
    """Whether the owner must still confirm the snapshot; it is not copied before."""
    promised: bool = False
    """Whether the owner may begin to write it at any moment, so that it cannot be copied."""

    @property
    def sealed(self) -> bool:
        return self.state >= State.SEALED


def pick_slot(slots: Sequence[Slot]) -> int | None:
    """Return the index of the slot to overwrite: an unfinished one, or else the oldest; None if all are in use."""
    newest = newest_sealed(slots)
    free = [index for index, slot in enumerate(slots) if index != newest and not slot.pins]
    return min(free, key=lambda index: (slots[index].sealed, slots[index].sequence), default=None)


def may_write(slots: Sequence[Slot], index: int) -> bool:
    """Return whether the slot holds neither the newest complete snapshot nor one being copied."""
    return 0 <= index < len(slots) and index != newest_sealed(slots) and not slots[index].pins


def newest_sealed(slots: Sequence[Slot]) -> int | None:
    """Return the index of the last sealed slot, or None."""
    sealed = [index for index, slot in enumerate(slots) if slot.sealed]
    return max(sealed, key=lambda index: slots[index].sequence, default=None)


def forget_newer(slots: Sequence[Slot], step: int, generation: int) -> None:
    """Drop snapshots of earlier generations after `step`, where this generation began.

    Those steps are abandoned, and must neither be restored nor hide the valid step.
    """
    for slot in slots:
        if slot.step > step and slot.generation < generation and slot.state is not State.EMPTY:
            slot.state, slot.manifest = State.EMPTY, {}
