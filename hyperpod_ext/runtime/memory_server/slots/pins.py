"""Who copies from a snapshot's slot, and what it costs to have that given up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum

from hyperpod_ext.runtime.memory_server.slots.region import Region


class Hold(IntEnum):
    """How much it costs to give up what a pin is for, where a save needs the slot: the least is given up first."""

    KEPT_BEFORE = 0
    """A copy that is done, and so is a newer one: of use only if a slower node is lost. No save waits for it."""
    WAITING = 1
    """A copy that is due and has not begun. The next due one takes its place."""
    KEPT = 2
    """A copy that is done: the step that is whole without this node, should another one be lost."""
    BEGUN = 3
    """A copy under way. Would it give way to a newer one each time, none would ever be done on a slow tier."""


class Pin:
    """Somebody copies a snapshot elsewhere; its slot is not overwritten until it is released."""

    def __init__(self, who: str, region: Region, index: int, hold: Hold) -> None:
        self.who, self.hold = who, hold
        self.reading = hold is Hold.BEGUN
        """Its bytes are being read: whoever needs the slot waits until that is over."""
        self.region, self.index = region, index
        self.slot = region.slots[index]
        self.manifest = self.slot.manifest
        self._cancelled = threading.Event()
        self.on_cancel: Callable[[], None] = lambda: None
        """Wakes whoever copies, where that waits for something else."""

    @property
    def data(self) -> memoryview:
        """The image. Release the view when done with it."""
        return self.region.view(self.index, int(self.manifest["nbytes"]))

    def cancel(self) -> None:
        """Ask whoever copies to stop: a newer snapshot needs the slot."""
        self._cancelled.set()
        self.on_cancel()

    def cancelled(self) -> bool:
        return self._cancelled.is_set()
