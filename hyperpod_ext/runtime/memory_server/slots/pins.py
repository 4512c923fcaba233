"""Pins, which keep saves from overwriting a snapshot that is being copied, and the cost of cancelling a pin."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum

from hyperpod_ext.runtime.memory_server.slots.region import Region


class Hold(IntEnum):
    """Cost of cancelling a pin when a save needs the pinned slot. The pin with the lowest cost is cancelled first."""

    KEPT_BEFORE = 0
    """The snapshot has been copied, and so has a newer snapshot. The older snapshot is needed only if a slower node is
    lost before it has copied the newer step, so a save need not wait for this pin."""
    WAITING = 1
    """The snapshot is due to be copied, but its copy has not begun. The next due snapshot can be copied instead."""
    KEPT = 2
    """The snapshot has been copied, and its step would be restored if another node were lost."""
    BEGUN = 3
    """The snapshot is being copied. A running copy costs most: if newer copies always replaced it, a slow tier would
    never finish a copy."""


class Pin:
    """Keeps a snapshot's slot from being overwritten until the pin is released or cancelled."""

    def __init__(self, who: str, region: Region, index: int, hold: Hold) -> None:
        self.who, self.hold = who, hold
        self.reading = hold is Hold.BEGUN
        """Whether a thread is reading the snapshot. A save that needs the slot waits for the end of the reading."""
        self.region, self.index = region, index
        self.slot = region.slots[index]
        self.manifest = self.slot.manifest
        self._cancelled = threading.Event()
        self.on_cancel: Callable[[], None] = lambda: None
        """Called by `cancel`. Wakes the copying thread if it is waiting, for example for other nodes."""

    @property
    def data(self) -> memoryview:
        """The snapshot's bytes. The caller must release the view after use."""
        return self.region.view(self.index, int(self.manifest["nbytes"]))

    def cancel(self) -> None:
        """Cancel the copy of the pinned snapshot, because a newer snapshot needs the slot."""
        self._cancelled.set()
        self.on_cancel()

    def cancelled(self) -> bool:
        return self._cancelled.is_set()
