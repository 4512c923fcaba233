"""Which slot is written next, and which snapshots exist. Pure: no memory is touched here.

A slot goes EMPTY -> WRITING -> SEALED. The newest sealed slot of an owner is never the one overwritten,
so a writer that dies halfway costs nothing that was whole before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from hyperpod_ext.runtime.checkpoint.manifest import Manifest

SLOTS = 2


class State(Enum):
    EMPTY = "empty"
    WRITING = "writing"
    SEALED = "sealed"


@dataclass(slots=True)
class Slot:
    """One place for one snapshot."""

    state: State = State.EMPTY
    sequence: int = -1
    """Rises with each save of the owner; a step number may go back after a restore, this does not."""
    step: int = -1
    save_id: str = ""
    manifest: Manifest = field(default_factory=dict)


def pick_slot(slots: list[Slot]) -> int:
    """Index of the slot to overwrite: never the newest sealed one, unsealed ones first, then the oldest."""
    newest = newest_sealed(slots)
    free = [index for index in range(len(slots)) if index != newest]
    return min(free, key=lambda index: (slots[index].state is State.SEALED, slots[index].sequence))


def newest_sealed(slots: list[Slot]) -> int | None:
    """Index of the slot sealed last, or None."""
    sealed = [index for index, slot in enumerate(slots) if slot.state is State.SEALED]
    return max(sealed, key=lambda index: slots[index].sequence, default=None)
