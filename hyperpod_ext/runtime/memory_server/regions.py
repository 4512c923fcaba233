"""Shared memory of one node: a memfd an owner, cut into slots. Thread-safe; knows no sockets."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

from hyperpod_ext.errors import MemoryTierFullError, NotFoundError, StaleGenerationError
from hyperpod_ext.runtime.checkpoint.manifest import FORMAT, Manifest, crc64nvme, sign
from hyperpod_ext.runtime.memory_server.slots import SLOTS, Slot, State, newest_sealed, pick_slot

_MADV_POPULATE_WRITE = 23  # Linux 5.14; first touch costs ten times the copy that follows
_MIB = 1 << 20


class Region:
    """Slots of one owner in one memfd."""

    def __init__(self, owner: int, slot_bytes: int) -> None:
        self.slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.slots = [Slot() for _ in range(SLOTS)]
        self.fd = os.memfd_create(f"hpx-rank-{owner}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.nbytes)
        # a worker that truncates its mapping must not take this process down with SIGBUS
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.memory = mmap.mmap(self.fd, self.nbytes)
        try:
            self.memory.madvise(_MADV_POPULATE_WRITE)
        except OSError:  # an older kernel: touch the pages ourselves
            for page in range(0, self.nbytes, mmap.PAGESIZE):
                self.memory[page] = 0

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * SLOTS

    def view(self, index: int, nbytes: int) -> memoryview:
        start = index * self.slot_bytes
        return memoryview(self.memory)[start : start + nbytes]

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)


class Regions:
    """All regions of a node. `usable_bytes` says how much more memory may be taken now."""

    def __init__(self, *, job: str, secret: bytes, budget: int | None, usable_bytes: Callable[[], int]) -> None:
        self._job, self._secret, self._budget, self._usable_bytes = job, secret, budget, usable_bytes
        self._regions: dict[int, list[Region]] = {}  # newest last; an older one lives until that is full
        self._generation = 0
        self._saves = 0
        self._lock = threading.Lock()

    def map(self, owner: int, slot_bytes: int) -> tuple[Region, int]:
        """Region of `owner` with room for `slot_bytes` a slot, and a descriptor of its memory for the worker.

        Raises:
            MemoryTierFullError: the node has not that much left; what is held stays as it is.
        """
        with self._lock:
            held = self._regions.setdefault(owner, [])
            if not held or held[-1].slot_bytes < slot_bytes:
                self._check_room(owner, slot_bytes)
                held.append(Region(owner, slot_bytes))
            return held[-1], os.dup(held[-1].fd)

    def next_slot(self, owner: int) -> int:
        """Slot that `owner` writes first; from there on it takes them in turn."""
        with self._lock:
            return pick_slot(self._newest_region(owner).slots)

    def begin(self, owner: int, index: int, step: int, save_id: str, generation: int) -> None:
        """`owner` writes a slot from now on; its former content no longer exists.

        Raises:
            StaleGenerationError: a newer generation is at work.
            NotFoundError: the slot holds the newest snapshot, which is never given up, or does not exist.
        """
        with self._lock:
            if generation < self._generation:
                raise StaleGenerationError(
                    f"rank {owner} of generation {generation} may not write step {step}: "
                    f"the job is at generation {self._generation}"
                )
            slots = self._newest_region(owner).slots
            if not 0 <= index < len(slots) or index == newest_sealed(slots):
                raise NotFoundError(f"slot {index} of rank {owner} is not free to be written")
            self._saves += 1
            slots[index] = Slot(State.WRITING, self._saves, step, save_id)

    def seal(self, owner: int, index: int, record: dict[str, Any]) -> Manifest:
        """Checksum the bytes in the slot and sign their manifest: from here on the snapshot exists."""
        with self._lock:
            region = self._newest_region(owner)
            slot = region.slots[index]
        if slot.state is not State.WRITING or slot.save_id != record.get("save_id"):
            raise NotFoundError(f"slot {index} of rank {owner} is not being written as {record.get('save_id')}")
        if not 0 < int(record["nbytes"]) <= region.slot_bytes:
            raise NotFoundError(f"slot {index} of rank {owner} does not hold {record['nbytes']} bytes")
        with region.view(index, int(record["nbytes"])) as data:
            checksum = crc64nvme(data)
        manifest = sign(
            {
                **record,
                "format": FORMAT,
                "job": self._job,
                "owner": owner,
                "step": slot.step,
                "save_id": slot.save_id,
                "crc64nvme": checksum,
            },
            self._secret,
        )
        with self._lock:
            slot.manifest, slot.state = manifest, State.SEALED
            if all(other.state is State.SEALED for other in region.slots):
                for older in self._regions[owner][:-1]:
                    older.close()
                del self._regions[owner][:-1]
        return manifest

    def held(self) -> list[Manifest]:
        """Manifests of all sealed snapshots, without their item tables."""
        with self._lock:
            brief = ("owner", "step", "save_id", "nbytes", "crc64nvme", "own_digest")
            return [{key: slot.manifest.get(key) for key in brief} for _, _, slot in self._sealed()]

    def open(self, owner: int, save_id: str) -> tuple[Manifest, int, int]:
        """Manifest, offset and a read-only descriptor of one sealed snapshot."""
        with self._lock:
            for region, index, slot in self._sealed():
                if slot.manifest["owner"] == owner and slot.save_id == save_id:
                    fd = os.open(f"/proc/self/fd/{region.fd}", os.O_RDONLY | os.O_CLOEXEC)
                    return slot.manifest, index * region.slot_bytes, fd
        raise NotFoundError(f"no sealed snapshot {save_id!r} of rank {owner} on this node")

    def fence(self, generation: int) -> None:
        """From now on refuse writers of generations before this one."""
        with self._lock:
            self._generation = max(self._generation, generation)

    def _sealed(self) -> list[tuple[Region, int, Slot]]:
        return [
            (region, index, slot)
            for regions in self._regions.values()
            for region in regions
            for index, slot in enumerate(region.slots)
            if slot.state is State.SEALED
        ]

    def _newest_region(self, owner: int) -> Region:
        regions = self._regions.get(owner)
        if not regions:
            raise NotFoundError(f"rank {owner} has no memory on this node; it must map some first")
        return regions[-1]

    def _check_room(self, owner: int, slot_bytes: int) -> None:
        needed = slot_bytes * SLOTS
        reserved = sum(region.nbytes for regions in self._regions.values() for region in regions)
        usable = self._usable_bytes()
        if self._budget is not None and reserved + needed > self._budget:
            raise MemoryTierFullError(
                f"rank {owner} needs {needed / _MIB:.1f} MiB ({SLOTS} slots) in the memory tier; its budget is "
                f"{self._budget / _MIB:.0f} MiB a node, of which {reserved / _MIB:.1f} MiB are taken",
                hint="Raise budget_mib of the memory tier, or run fewer workers on a node.",
            )
        if needed > usable:
            raise MemoryTierFullError(
                f"rank {owner} needs {needed / _MIB:.1f} MiB ({SLOTS} slots) in the memory tier; "
                f"the node can spare {usable / _MIB:.1f} MiB",
                hint="Use machines or containers with more memory, or run fewer workers on a node.",
            )
