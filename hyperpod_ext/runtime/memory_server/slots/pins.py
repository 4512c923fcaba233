"""Pins, with which a copy keeps a save from overwriting the copied snapshot, and the cost of cancelling a pin."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum

from hyperpod_ext.runtime.memory_server.slots.region import Region


class Hold(IntEnum):
    """Cost of cancelling a pin when a save needs the pinned slot. The pin with the lowest cost is cancelled first."""

    KEPT_BEFORE = 0
    """The snapshot has been copied, and so has a newer snapshot. The older snapshot is needed only if a node that
    copies more slowly is lost, so a save does not wait for this pin."""
    WAITING = 1
    """The snapshot is due to be copied, but its copy has not begun, and the copy of the next due snapshot would replace
    its copy."""
    KEPT = 2
    """The snapshot has been copied, and its step would be restored if another node were lost."""
    BEGUN = 3
    """The snapshot is being copied. A running copy has the highest cost, because a slow tier would never finish a copy
    if newer copies always replaced running copies."""


class Pin:
    """Keeps a snapshot's slot from being overwritten while the snapshot is copied, until the pin is released."""

    def __init__(self, who: str, region: Region, index: int, hold: Hold) -> None:
        self.who, self.hold = who, hold
        self.reading = hold is Hold.BEGUN
        """Whether the snapshot's bytes are being read, so that a save that needs the slot must wait until the reading
        ends."""
        self.region, self.index = region, index
        self.slot = region.slots[index]
        self.manifest = self.slot.manifest
        self._cancelled = threading.Event()
        self.on_cancel: Callable[[], None] = lambda: None
        """Called by `cancel`, to wake the copying thread if the thread waits for another event."""

    @property
    def data(self) -> memoryview:
        """The snapshot's bytes. The caller must release the view after use."""
        return self.region.view(self.index, int(self.manifest["nbytes"]))

    def cancel(self) -> None:
        """Cancel the copy of the snapshot, because a newer snapshot needs the slot."""
        self._cancelled.set()
        self.on_cancel()

    def cancelled(self) -> bool:
        return self._cancelled.is_set()
