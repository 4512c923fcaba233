"""Which slot is written next, and which snapshots exist. Pure: no memory is touched here.

    EMPTY -> WRITING -> SEALED -> REPLICATED -> DURABLE

The newest whole slot of an owner is never the one overwritten, so a writer that dies halfway costs
nothing that was whole before. Neither is one that is pinned: somebody copies it to another tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from hyperpod_ext.runtime.snapshot.manifest import Manifest

MIN_SLOTS = 2
"""One that is whole, one that is written."""


class State(IntEnum):
    EMPTY = 0
    WRITING = 1
    SEALED = 2
    REPLICATED = 3
    DURABLE = 4


@dataclass(slots=True)
class Slot:
    """One place for one snapshot."""

    state: State = State.EMPTY
    sequence: int = -1
    """Rises with each save of the owner; a step number may go back after a restore, this does not."""
    step: int = -1
    generation: int = 0
    save_id: str = ""
    manifest: Manifest = field(default_factory=dict)
    pins: set[str] = field(default_factory=set)
    """Who copies from it now."""
    provisional: bool = False
    """Its owner has yet to say whether it is whole: it is copied nowhere before."""
    promised: bool = False
    """Its owner was told to write it next, and may begin any moment: too late to copy from it."""

    @property
    def sealed(self) -> bool:
        return self.state >= State.SEALED


def pick_slot(slots: Sequence[Slot]) -> int | None:
    """Index of the slot to overwrite, unfinished ones first, then the oldest; None when all are in use."""
    newest = newest_sealed(slots)
    free = [index for index, slot in enumerate(slots) if index != newest and not slot.pins]
    return min(free, key=lambda index: (slots[index].sealed, slots[index].sequence), default=None)


def may_write(slots: Sequence[Slot], index: int) -> bool:
    """Whether overwriting the slot costs neither the newest whole snapshot nor one that is being copied."""
    return 0 <= index < len(slots) and index != newest_sealed(slots) and not slots[index].pins


def newest_sealed(slots: Sequence[Slot]) -> int | None:
    """Index of the slot sealed last, or None."""
    sealed = [index for index, slot in enumerate(slots) if slot.sealed]
    return max(sealed, key=lambda index: slots[index].sequence, default=None)


def forget_newer(slots: Sequence[Slot], step: int, generation: int) -> None:
    """Drop what generations before this one saved after `step`, where this one began: their steps were
    given up, and must neither be restored nor stand in the way of the step that counts."""
    for slot in slots:
        if slot.step > step and slot.generation < generation and slot.state is not State.EMPTY:
            slot.state, slot.manifest = State.EMPTY, {}
