"""Pins, by which copies keep snapshots in their slots, and the cost of cancelling a pin."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum

from hyperpod_ext.runtime.memory_server.slots.region import Region


class Hold(IntEnum):
    """Cost of cancelling a pin when a save needs its slot. The cheapest pin is cancelled first."""

    KEPT_BEFORE = 0
    """A completed copy that is older than another completed copy. Needed only if a slower node is lost. A save does not
    wait for such a copy."""
    WAITING = 1
    """A due copy that has not begun, which the next due copy would replace."""
    KEPT = 2
    """A completed copy, whose step is restored if another node is lost."""
    BEGUN = 3
    """A running copy. If newer copies always replaced running ones, a slow tier would never finish a copy."""


class Pin:
    """Keeps a snapshot's slot from being overwritten while the snapshot is copied, until the pin is released."""

    def __init__(self, who: str, region: Region, index: int, hold: Hold) -> None:
        self.who, self.hold = who, hold
        self.reading = hold is Hold.BEGUN
        """Whether the bytes are being read. A save then waits until the reading ends."""
        self.region, self.index = region, index
        self.slot = region.slots[index]
        self.manifest = self.slot.manifest
        self._cancelled = threading.Event()
        self.on_cancel: Callable[[], None] = lambda: None
        """Wakes the copying thread if the thread waits for another event."""

    @property
    def data(self) -> memoryview:
        """The image. Release the view after use."""
        return self.region.view(self.index, int(self.manifest["nbytes"]))

    def cancel(self) -> None:
        """Cancel the copy, because a newer snapshot needs the slot."""
        self._cancelled.set()
        self.on_cancel()

    def cancelled(self) -> bool:
        return self._cancelled.is_set()
