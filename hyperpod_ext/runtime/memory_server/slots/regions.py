"""The memory of one kind of snapshots on this node: each rank's regions, their slots, and the pins of copies.
Thread-safe."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hyperpod_ext.errors import NotFoundError, StaleGenerationError
from hyperpod_ext.runtime.memory_server.protocol.requests import WhenBusy
from hyperpod_ext.runtime.memory_server.slots import slots as s
from hyperpod_ext.runtime.memory_server.slots.budget import Budget
from hyperpod_ext.runtime.memory_server.slots.pins import Hold, Pin
from hyperpod_ext.runtime.memory_server.slots.region import Region
from hyperpod_ext.runtime.snapshot.manifest import (
    FORMAT,
    Manifest,
    content_of,
    crc64nvme,
    crc_text,
    crc_value,
    generation_of,
    sign,
)

_MIB = 1 << 20
_LOOK_S = 0.5
"""Seconds between two checks that a process for which a thread waits is still alive. The death of a process does not
wake the waiting thread."""


class Regions:
    """All regions of one kind: for own snapshots, for replicas of other nodes' snapshots, or for parity pieces."""

    def __init__(self, *, kind: str, job: str, secret: bytes, budget: Budget, slots: int) -> None:
        self._kind, self._job, self._secret, self._budget, self._slots = kind, job, secret, budget, slots
        # by rank, the newest region last; an older region is freed when newer regions have enough complete snapshots
        self._regions: dict[int, list[Region]] = {}
        self._pins: list[Pin] = []
        self._generation = 0
        self._saves = self._pinned = 0
        self._changed = threading.Condition()

    def map(self, owner: int, slot_bytes: int) -> tuple[Region, int]:
        """Return the region of rank `owner` whose slots have at least `slot_bytes`, and a file descriptor of the
        region. Creates the region if necessary.

        Raises:
            MemoryTierFullError: the node has not enough memory; existing snapshots are kept.
        """
        with self._changed:
            held = self._regions.setdefault(owner, [])
            if not held or held[-1].slot_bytes < slot_bytes:
                what = f"rank {owner} ({self._slots} slots of {slot_bytes / _MIB:.1f} MiB, {self._kind})"
                held.append(self._budget.make(f"hpx-{self._kind}-{owner}", slot_bytes, self._slots, what))
            return held[-1], os.dup(held[-1].fd)

    def attach(self, owner: int) -> tuple[Region, int] | None:
        """Return the region of rank `owner` and a file descriptor of the region; None if the rank has no region."""
        with self._changed:
            held = self._regions.get(owner)
            return (held[-1], os.dup(held[-1].fd)) if held else None

    def next_slot(
        self,
        owner: int,
        when_busy: WhenBusy = "wait",
        timeout_s: float | None = None,
        *,
        gone: Callable[[], bool] = lambda: False,
    ) -> int | None:
        """Return the index of the slot to which rank `owner` may write its next snapshot. If all slots are in use,
        waits for a slot, skips the save or cancels a copy, as `when_busy` says. Returns None if the save must be
        skipped.

        Raises:
            NotFoundError: the rank has no region, or `gone()` reports that its process died while it waited.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                if gone():
                    raise NotFoundError(f"the process of rank {owner} ended while it waited for a slot")
                slots = self._newest_region(owner).slots
                index = s.pick_slot(slots)
                if index is not None:
                    slots[index].promised = True
                    return index
                if self._give_one_up(owner, at_most=Hold.KEPT_BEFORE):
                    continue
                if when_busy == "skip":
                    return None
                if when_busy == "supersede" and self._give_one_up(owner):
                    continue
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(_LOOK_S if left is None else min(left, _LOOK_S))

    def wake(self) -> None:
        """Wake all calls that wait for a slot, so that they check whether the process that needs the slot has ended."""
        with self._changed:
            self._changed.notify_all()

    def _give_one_up(self, owner: int, at_most: Hold = Hold.BEGUN) -> bool:
        """Cancel the copies of one snapshot, but never of the newest complete snapshot. Returns whether the cancelled
        snapshot's slot is free at once.

        Chooses the snapshot with the lowest cost; the cost of a snapshot is the highest `Hold` of its pins. Among
        snapshots with equal cost, chooses the oldest. Never chooses a snapshot whose cost is above `at_most`."""
        slots = self._newest_region(owner).slots
        newest = s.newest_sealed(slots)
        holds = {pin.who: pin.hold for pin in self._pins}

        def cost(slot: s.Slot) -> Hold:
            return max(holds[who] for who in slot.pins)

        pinned = [slot for index, slot in enumerate(slots) if slot.pins and index != newest and cost(slot) <= at_most]
        given_up = min(pinned, key=lambda slot: (cost(slot), slot.sequence), default=None)
        for pin in self._pins:
            if pin.slot is given_up:
                pin.cancel()
                if not pin.reading:  # no thread is reading the snapshot, so its slot is free now
                    pin.slot.pins.discard(pin.who)
        return given_up is not None and not given_up.pins

    def begin_copy(self, pin: Pin) -> bool:
        """Begin the copy of a snapshot that was pinned earlier. Returns False if the pin was cancelled meanwhile,
        because a save needed the slot."""
        with self._changed:
            pin.hold = Hold.BEGUN
            return not pin.cancelled()

    def begin_reading(self, pin: Pin) -> bool:
        """Begin to read the pinned snapshot's bytes. Returns False if the pin was cancelled meanwhile, because a save
        needed the slot."""
        with self._changed:
            pin.reading = not pin.cancelled()
            return pin.reading

    def begin(self, owner: int, index: int, step: int, save_id: str, generation: int) -> None:
        """Allow rank `owner` to write to a slot. The slot's old snapshot is dropped.

        Raises:
            StaleGenerationError: a newer generation has begun.
            NotFoundError: the slot contains the newest snapshot, is being copied, or does not exist.
        """
        with self._changed:
            self._check_generation(owner, step, generation)
            slots = self._newest_region(owner).slots
            if not s.may_write(slots, index):
                raise NotFoundError(f"slot {index} of rank {owner} must not be overwritten now")
            self._saves += 1
            slots[index] = s.Slot(s.State.WRITING, self._saves, step, generation, save_id)

    def _check_generation(self, owner: int, step: int, generation: int) -> None:
        if generation < self._generation:
            raise StaleGenerationError(
                f"rank {owner} of generation {generation} may not write step {step}: "
                f"the job is at generation {self._generation}"
            )

    def seal(self, owner: int, index: int, record: Mapping[str, Any], *, provisional: bool = False) -> Manifest:
        """Compute the checksum of the snapshot in the slot, and sign the snapshot's manifest. A sealed snapshot can be
        read and copied. A provisional snapshot is not copied before `keep` confirms it.

        The record's field `checked` has the number of bytes at the snapshot's start whose checksum the rank has already
        computed, and this checksum.
        """
        with self._changed:
            region = self._newest_region(owner)
            slot = region.slots[index]
        if slot.state is not s.State.WRITING or slot.save_id != record.get("save_id"):
            raise NotFoundError(f"slot {index} of rank {owner} is not being written as {record.get('save_id')}")
        nbytes = int(record["nbytes"])
        if not 0 < nbytes <= region.slot_bytes:
            raise NotFoundError(f"slot {index} of rank {owner} has no room for {nbytes} bytes")
        checked, before = record.get("checked") or (0, crc_text(0))
        if not 0 <= int(checked) <= nbytes:
            raise NotFoundError(f"slot {index} of rank {owner}: `checked` is {checked}, not 0 to {nbytes} bytes")
        with region.view(index, nbytes) as data:
            checksum = crc64nvme(data[int(checked) :], crc_value(before))
        record = {key: value for key, value in record.items() if key != "checked"}
        own = {"format": FORMAT, "job": self._job, "rank": owner, "step": slot.step, "save_id": slot.save_id}
        known = {"generation": slot.generation, "crc64nvme": crc_text(checksum)}
        manifest = sign({**record, **own, **known}, self._secret)
        self.adopt(owner, index, manifest, provisional=provisional)
        return manifest

    def adopt(self, owner: int, index: int, manifest: Manifest, *, provisional: bool = False) -> None:
        """Register the snapshot that `manifest` describes, after its bytes were written to the slot.

        Raises:
            StaleGenerationError: a newer generation has begun while the snapshot was written.
        """
        with self._changed:
            region = self._newest_region(owner)
            slot = region.slots[index]
            if slot.state is not s.State.WRITING or slot.save_id != manifest["save_id"]:
                raise StaleGenerationError(f"{manifest['save_id']} of rank {owner} was dropped while it was written")
            slot.manifest, slot.state, slot.provisional = manifest, s.State.SEALED, provisional
            self._close_older(owner)
            self._changed.notify_all()

    def _close_older(self, owner: int) -> None:
        """Free a rank's older regions that no copy reads, if newer regions contain enough snapshots."""
        newer = 0
        for region in self._regions[owner][::-1]:
            if newer >= s.MIN_SLOTS and not any(slot.pins for slot in region.slots):
                self._regions[owner].remove(region)
                region.close()
                self._budget.give_back(region.nbytes)
            newer += sum(slot.sealed for slot in region.slots)

    def keep(self, owner: int, save_id: str) -> None:
        """Confirm a provisional snapshot, so that it may be copied."""
        with self._changed:
            for _, slot in self._sealed(owner):
                slot.provisional = slot.provisional and slot.save_id != save_id

    def take_back(self, owner: int, save_id: str) -> None:
        """Drop a provisional snapshot, because the rank has found that it is invalid."""
        with self._changed:
            for region, slot in self._sealed(owner):
                if slot.save_id == save_id:
                    slot.state, slot.manifest = s.State.EMPTY, {}
                    for other in region.slots:  # choose the next slot again, because another snapshot is the newest now
                        other.promised = False
            self._changed.notify_all()

    @contextmanager
    def pin(
        self, owner: int, save_id: str, who: str, *, hold: Hold = Hold.BEGUN, restoring: bool = False
    ) -> Iterator[Pin]:
        """Pin a snapshot inside the `with` block, so that no save overwrites it.

        A pin whose `hold` is not the default is for a later copy, and may be cancelled until `begin_reading`. If
        `restoring`, the pin is for a restore, which may read even a slot that was promised to a save.

        Raises:
            NotFoundError: the snapshot is no longer on this node, or a save is about to overwrite it.
        """
        with self._changed:
            region, index, slot = self._find(owner, save_id)
            if slot.promised and not restoring:
                raise NotFoundError(f"{save_id} of rank {owner} is about to be overwritten")
            self._pinned += 1
            pin = Pin(f"{who} ({self._pinned})", region, index, hold)
            slot.pins.add(pin.who)
            self._pins.append(pin)
        try:
            yield pin
        finally:
            with self._changed:
                self._pins.remove(pin)
                slot.pins.discard(pin.who)
                self._changed.notify_all()

    def mark(self, owner: int, save_id: str, state: s.State) -> None:
        """Set a snapshot's state to `state`, if the snapshot still exists and has not passed this state."""
        with self._changed:
            for _, slot in self._sealed(owner):
                if slot.save_id == save_id and slot.state < state:
                    slot.state = state
            self._changed.notify_all()

    def held(self) -> list[dict[str, Any]]:
        """Return summaries of all complete snapshots of this kind."""
        with self._changed:
            return [
                {**summary_of(slot.manifest), "state": slot.state.name.lower()}
                for owner in self._regions
                for _, slot in self._sealed(owner)
            ]

    def manifests(self) -> list[Manifest]:
        """Return the manifests of all complete snapshots of this kind."""
        with self._changed:
            return [slot.manifest for owner in self._regions for _, slot in self._sealed(owner)]

    def open(self, owner: int, save_id: str) -> tuple[Manifest, int, int]:
        """Return a complete snapshot's manifest, its offset in its region, and a read-only descriptor of the region."""
        with self._changed:
            region, index, slot = self._find(owner, save_id)
            fd = os.open(f"/proc/self/fd/{region.fd}", os.O_RDONLY | os.O_CLOEXEC)
            return slot.manifest, index * region.slot_bytes, fd

    def open_manifest(self, owner: int, save_id: str) -> Manifest:
        """Return the manifest of one complete snapshot."""
        with self._changed:
            return self._find(owner, save_id)[2].manifest

    def fence(self, generation: int, step: int | None) -> None:
        """Begin a new generation after `step`: refuse writes from earlier generations, and drop their later
        snapshots."""
        with self._changed:
            self._generation = max(self._generation, generation)
            for regions in self._regions.values():
                for region in regions:
                    for slot in region.slots:
                        slot.promised = False
                    if step is not None:
                        s.forget_newer(region.slots, step, generation)
            self._changed.notify_all()

    def drop(self, owner: int) -> None:
        """Free all memory of a rank that is no longer on this node."""
        with self._changed:
            for region in self._regions.pop(owner, []):
                region.close()
                self._budget.give_back(region.nbytes)

    def drop_unused(self, owner: int) -> None:
        """Free a rank's memory as `drop` does, but keep each region with a snapshot that is being copied."""
        with self._changed:
            for region in [r for r in self._regions.get(owner, []) if not any(slot.pins for slot in r.slots)]:
                self._regions[owner].remove(region)
                region.close()
                self._budget.give_back(region.nbytes)
            if owner in self._regions and not self._regions[owner]:
                del self._regions[owner]

    def owners(self) -> list[int]:
        with self._changed:
            return list(self._regions)

    def newest(self, owner: int) -> Manifest | None:
        """Return the manifest of the newest complete snapshot that is not provisional."""
        with self._changed:
            found = [slot for _, slot in self._sealed(owner) if not slot.provisional]
            return max(found, key=lambda slot: slot.sequence).manifest if found else None

    def has_provisional(self, owner: int) -> bool:
        with self._changed:
            return any(slot.provisional for _, slot in self._sealed(owner))

    def wait_state(self, owner: int, save_id: str, state: s.State, timeout_s: float) -> bool:
        """Wait until a snapshot has reached `state`. Returns False after `timeout_s`."""

        def reached() -> bool:
            return any(slot.save_id == save_id and slot.state >= state for _, slot in self._sealed(owner))

        with self._changed:
            return self._changed.wait_for(reached, timeout_s)

    def _sealed(self, owner: int) -> list[tuple[Region, s.Slot]]:
        return [(region, slot) for region in self._regions.get(owner, []) for slot in region.slots if slot.sealed]

    def _find(self, owner: int, save_id: str) -> tuple[Region, int, s.Slot]:
        for region in self._regions.get(owner, []):
            for index, slot in enumerate(region.slots):
                if slot.sealed and slot.save_id == save_id:
                    return region, index, slot
        raise NotFoundError(f"this node has no complete snapshot {save_id!r} of rank {owner} ({self._kind})")

    def _newest_region(self, owner: int) -> Region:
        regions = self._regions.get(owner)
        if not regions:
            raise NotFoundError(f"rank {owner} has no memory on this node; it must send a `map` request first")
        return regions[-1]


def summary_of(manifest: Manifest) -> dict[str, Any]:
    """Return the fields of a snapshot's manifest that nodes need to choose the step to restore."""
    keys = ("rank", "world_size", "step", "save_id", "nbytes", "crc64nvme", "plan", "own_digest", "saved_at")
    return {
        **{key: manifest.get(key) for key in keys},
        "generation": generation_of(str(manifest["save_id"])),
        "content": content_of(manifest),
        "sharing": manifest.get("extras", {}).get("sharing", "shard"),
    }
