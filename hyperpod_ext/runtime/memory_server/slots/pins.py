"""Pins of snapshot slots by copies, and the cost of cancelling them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum

from hyperpod_ext.runtime.memory_server.slots.region import Region


class Hold(IntEnum):
    """Cost of cancelling a pin when a save needs the slot: the cheapest is cancelled first."""

    KEPT_BEFORE = 0
    """A completed copy, older than another completed one: only needed if a slower node is lost. No save waits."""
    WAITING = 1
    """A due copy that has not begun. The next due copy replaces it."""
    KEPT = 2
    """A completed copy: the step to restore if another node is lost."""
    BEGUN = 3
    """A running copy. If newer ones always replaced it, a slow tier would never finish one."""


class Pin:
    """Keeps a snapshot's slot from being overwritten while it is copied, until released."""

    def __init__(self, who: str, region: Region, index: int, hold: Hold) -> None:
        self.who, self.hold = who, hold
        self.reading = hold is Hold.BEGUN
        """Whether the bytes are being read: a save waits for the end."""
        self.region, self.index = region, index
        self.slot = region.slots[index]
        self.manifest = self.slot.manifest
        self._cancelled = threading.Event()
        self.on_cancel: Callable[[], None] = lambda: None
        """Wakes the copying thread if it waits for something else."""

    @property
    def data(self) -> memoryview:
        """The image. Release the view when done with it."""
        return self.region.view(self.index, int(self.manifest["nbytes"]))

    def cancel(self) -> None:
        """Cancel the copy: a newer snapshot needs the slot."""
        self._cancelled.set()
        self.on_cancel()

    def cancelled(self) -> bool:
        return self._cancelled.is_set()
