"""The budget of the memory tier on this node. Memory is reserved before pages are allocated; a reservation above the
budget is refused with an error that states the sizes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hyperpod_ext.errors import MemoryTierFullError
from hyperpod_ext.runtime.memory_server.slots.region import Region, page_aligned

_MIB = 1 << 20


class Budget:
    """Limits the total memory of own snapshots, replicas and parity pieces on this node. `limit` is the maximum in
    bytes; None to be limited only by the node's free memory, which `usable_bytes` returns in bytes."""

    def __init__(self, limit: int | None, usable_bytes: Callable[[], int]) -> None:
        self._limit, self._usable_bytes = limit, usable_bytes
        self._reserved = 0
        self._filling: list[Region] = []
        self._lock = threading.Lock()

    def take(self, needed: int, what: str) -> None:
        """Reserve `needed` bytes before their pages are allocated. `what` names the purpose of the memory in the
        error's message.

        Raises:
            MemoryTierFullError: there is not enough memory.
        """
        with self._lock:
            self._filling = [region for region in self._filling if region.untouched]
            usable = self._usable_bytes() - sum(region.untouched for region in self._filling)
            if self._limit is not None and self._reserved + needed > self._limit:
                raise MemoryTierFullError(
                    f"{what} needs {needed / _MIB:.1f} MiB in the memory tier; its budget is "
                    f"{self._limit / _MIB:.0f} MiB a node, of which {self._reserved / _MIB:.1f} MiB are taken",
                    hint="Raise budget_mib of the memory tier, or run fewer workers on a node.",
                )
            if needed > usable:
                raise MemoryTierFullError(
                    f"{what} needs {needed / _MIB:.1f} MiB in the memory tier; "
                    f"the node can spare {usable / _MIB:.1f} MiB",
                    hint="Use machines or containers with more memory, or run fewer workers on a node.",
                )
            self._reserved += needed

    def make(self, name: str, slot_bytes: int, slots: int, what: str) -> Region:
        """Create a region with `slots` slots after reserving the memory of all its pages, which are allocated later."""
        needed = slots * page_aligned(slot_bytes)
        self.take(needed, what)
        try:
            region = Region(name, slot_bytes, slots)
        except OSError as error:
            self.give_back(needed)
            raise MemoryTierFullError(f"{what}: the system cannot allocate shared memory: {error.strerror}") from error
        with self._lock:
            self._filling.append(region)
        return region

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self._reserved -= nbytes
