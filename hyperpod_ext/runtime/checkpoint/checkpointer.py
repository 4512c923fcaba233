"""Save snapshots of one rank's state into the memory server of its node, and restore from snapshots."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from hyperpod_ext.errors import NotFoundError
from hyperpod_ext.runtime.checkpoint.frozen import FrozenPrefix
from hyperpod_ext.runtime.checkpoint.mutation_check import CopySamples, MutationCheck
from hyperpod_ext.runtime.checkpoint.overlapped_copy import OverlappedCopy, Room
from hyperpod_ext.runtime.checkpoint.staging import Background, Stager
from hyperpod_ext.runtime.checkpoint.value_limit import check_values
from hyperpod_ext.runtime.memory_server.client.client import Mapping as SlotMapping
from hyperpod_ext.runtime.memory_server.client.client import MemoryClient, MemoryLostError
from hyperpod_ext.runtime.memory_server.client.peer_client import PeerClient
from hyperpod_ext.runtime.memory_server.client.rebuild import Rebuilt
from hyperpod_ext.runtime.memory_server.protocol.requests import WhenBusy
from hyperpod_ext.runtime.snapshot.fast_copy import Unthrottle
from hyperpod_ext.runtime.snapshot.image import Layout, views
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme, crc_text
from hyperpod_ext.runtime.snapshot.snapshot import Snapshot, fill
from hyperpod_ext.runtime.snapshot.tree import Parts
from hyperpod_ext.runtime.state.device_steps import Device
from hyperpod_ext.runtime.storage.mac import UNBOUND

Given = ParamSpec("Given")
Result = TypeVar("Result")


_PLAIN = torch.Tensor, torch.nn.Parameter


def _with_the_next_server(
    call: Callable[Concatenate[Checkpointer, Given], Result],
) -> Callable[Concatenate[Checkpointer, Given], Result]:
    """Decorate a method: if the memory server ends during a call, connect to the next server and repeat the call.

    The snapshots in the memory server that ended are lost. The state itself is still in this process, and is saved
    again by the repeated call or by the next save.
    """

    @functools.wraps(call)
    def again(self: Checkpointer, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        while True:
            try:
                return call(self, *args, **kwargs)
            except MemoryLostError:
                self._turn_to_the_next_server()

    return again


class Checkpointer:
    """Saves and restores snapshots of one rank.

    A save copies the state into a slot: shared memory for one snapshot, which outlives this process. During training,
    the memory server seals the slot of a save: it computes the checksum, and signs the manifest.

    Args:
        client: connection to the node's memory server, which no other object may use.
        rank: rank that owns the snapshots.
        world_size: number of ranks.
        job: the job's name. Snapshots of other jobs are refused.
        secret: the job's secret, with which manifests are verified.
        overlap: copy in the background. Tensors must not change during the copy, that is, until `wait_staged` returns.
        when_busy: what to do if no slot is free: `wait`, `skip` the save, or `supersede` (cancel an older copy).
        encrypted: whether connections to memory servers of other nodes use TLS.
    """

    def __init__(
        self,
        client: MemoryClient,
        rank: int,
        *,
        world_size: int,
        job: str,
        secret: bytes,
        overlap: bool = False,
        when_busy: WhenBusy = "wait",
        encrypted: bool = False,
    ) -> None:
        self._encrypted = encrypted
        self._client, self._rank, self._world_size = client, rank, world_size
        self._job, self._secret = job, secret
        self._overlap, self._when_busy = overlap, when_busy
        self._layout: Layout | None = None
        self._live: Parts | None = None
        self._mapping: SlotMapping | None = None
        self._views: list[list[torch.Tensor]] = []
        self._framed: set[int] = set()
        self._generation = 0
        self._staged: _Staged | None = None
        self._now: list[int] = []
        self._later: list[int] = []
        self._frozen: FrozenPrefix | None = None
        """The frozen parameters, whose bytes come first in a snapshot of the present layout."""
        self._mutation_check: MutationCheck | None = None
        """Detects changes of the tensors that are copied in the background."""
        self._overlapped: dict[int, OverlappedCopy] = {}
        """The background copy into each slot, by slot index. Each save into the slot uses the same object."""
        self._samples: dict[int, CopySamples] = {}
        """The comparison of live tensors with their copies in each slot, by slot index."""
        self._newest = ("", 0)
        """Save ID and slot of the last completely copied snapshot; an empty save ID if there is none."""
        self._room = Room()
        self._unthrottle = Unthrottle()
        """Flag that is set while the caller waits for a copy: the copy then no longer computes the checksum, and so
        ends earlier."""
        self._peers: dict[tuple[str, int], PeerClient] = {}
        crc64nvme(b"")  # load the checksum library now, so that no restore waits for it
        self._stager = Stager()
        self._is_good: Callable[[int], bool] = lambda step: True
        self._background = Background("hpx-stage") if overlap else None
        self._lost = False
        """Whether the memory server that had the last save has ended."""
        self._attach()

    @_with_the_next_server
    def _attach(self) -> None:
        """Map the slots (shared memory) that an earlier process of this rank has used, if there are any."""
        self._mapping = self._client.attach(self._rank)

    def _turn_to_the_next_server(self) -> None:
        """Connect to the next memory server, which has no data of this rank, and discard the layout of the slots.

        The next save makes a new layout of the state.
        """
        if self._background is not None:
            self._unthrottle.set()
            with contextlib.suppress(MemoryLostError):  # the running copy fails, as its memory server has ended
                self._background.wait()
        self._staged = self._mapping = self._layout = self._live = self._mutation_check = None
        self._newest = ("", 0)
        self._views, self._overlapped, self._samples, self._lost = [], {}, {}, True
        self._client.connect()

    def follow(self, device: Device | None, is_good: Callable[[int], bool]) -> None:
        """Make later saves wait for `device`, which changes the tensors asynchronously.

        Args:
            device: the device; None if all tensors change synchronously.
            is_good: called after a copy; returns whether the copied step is valid, that is, not aborted. The memory
                server does not sign an invalid copy.
        """
        self.wait_staged()
        self._stager.device, self._is_good, self._mutation_check = device, is_good, None
        if self._frozen is not None:
            self._frozen.forget()

    # --- saving ---------------------------------------------------------------------------------

    @_with_the_next_server
    def reserve(self, nbytes: int) -> None:
        """Reserve memory, before the first save, for snapshots whose tensors have `nbytes` bytes.

        Raises:
            MemoryTierFullError: the node's memory tier has no room. The error leaves existing snapshots unchanged.
        """
        self.wait_staged()
        if self._mapping is None or self._mapping.slot_bytes < nbytes:
            self._mapping = self._client.map(self._rank, nbytes)
            self._layout = None

    @_with_the_next_server
    def prepare(self, parts: Parts, changing: Callable[[torch.Tensor], bool] = lambda tensor: False) -> None:
        """Make the layout of this state, and reserve memory for it, before the first save.

        Args:
            parts: the state, as split by `tree.take_apart`.
            changing: see `save`.

        Raises:
            MemoryTierFullError: the node's memory tier has no room. The error leaves existing snapshots unchanged.
        """
        self.wait_staged()
        self._lay_out(parts, changing)

    @_with_the_next_server
    def save(
        self,
        step: int,
        save_id: str,
        generation: int,
        parts: Parts,
        extras: Mapping[str, Any] | None = None,
        *,
        own_digest: str = "",
        changing: Callable[[torch.Tensor], bool] = lambda tensor: False,
        at_once: bool = False,
        when_busy: WhenBusy | None = None,
    ) -> bool:
        """Copy the state into a free slot (shared memory), and let the memory server checksum and sign the copy. Return
        False if the save was skipped.

        Args:
            step: number of the saved step.
            save_id: save ID of the commit: its generation and step.
            generation: generation of the commit.
            parts: the state, as split by `tree.take_apart`.
            extras: additional JSON values for the manifest.
            own_digest: digest of the part of the state that may differ between ranks.
            changing: returns whether a tensor may change before `wait_staged`, as buffers do in a forward pass. Tensors
                that may change are copied before `save` returns. `changing` is called only when the layout changes.
            at_once: copy all tensors before `save` returns.
            when_busy: what to do if no slot is free; None: the default of this object.

        Raises:
            MemoryTierFullError: the node's memory tier has no room. The error leaves existing snapshots unchanged.
            StaleGenerationError: a newer generation has saved.
        """
        self.wait_staged()
        when_busy = when_busy or self._when_busy
        if when_busy == "skip" and self._client.busy():
            return False
        check_values(parts)
        layout = self._lay_out(parts, changing)
        if generation != self._generation:  # the slot for the next save was assigned in the earlier generation
            self._generation = generation
            self._client.forget_slot()
        record = {
            "save_id": save_id,
            "world_size": self._world_size,
            "own_digest": own_digest,
            "plan": layout.plan.digest,
            "nbytes": layout.plan.nbytes,
            "values": parts.values,
            "extras": dict(extras or {}),
            "saved_at": time.time(),  # the time of the save is only displayed to users
        }
        begin = functools.partial(self._begin, layout, step, save_id, generation, when_busy)
        self._stager.follow()
        if self._background is None or not self._overlap or at_once:
            if (slot := begin()) is None:
                return False
            self._store_frozen(slot, layout, record)
            left = [*self._now, *self._later]
            self._stager.copy([layout.locals[i] for i in left], [self._views[slot][i] for i in left])
            self._newest = save_id, slot
            if not self._is_good(step):
                return False
            self._client.seal(self._rank, slot, record)
            return True
        slot = None
        # if no tensor must be copied now, the background thread calls `begin`, which waits for the device
        if self._stager.device is None or self._now:
            if (slot := begin()) is None:
                return False
            now = self._now
            self._stager.copy([layout.locals[i] for i in now], [self._views[slot][i] for i in now])
        if self._mutation_check is None:
            overlapped = self._overlapped_items()
            names = [layout.plan.items[i].fqn for i in overlapped]
            self._mutation_check = MutationCheck(names, [layout.locals[i] for i in overlapped])
        self._staged = _Staged(step, save_id, self._mutation_check, self._mutation_check.look())
        self._unthrottle.clear()
        self._background.do(functools.partial(self._stage, self._staged, layout, slot, begin, record))
        self._staged.began = time.monotonic()
        return True

    def _begin(self, layout: Layout, step: int, save_id: str, generation: int, when_busy: WhenBusy) -> int | None:
        """Drop the old snapshot in a slot, and return the slot for a snapshot of `step`; None if the save is skipped.

        The method first waits until the device has finished `step`. Once the device has finished, every rank that
        shares the state has committed the previous step, so no rank needs the dropped snapshot any more.
        """
        self._stager.wait_device()
        if not self._is_good(step):
            return None
        slot = self._client.begin(self._rank, step, save_id, generation, when_busy)
        if slot is not None:
            self._lost = False
            mapping = self._mapping
            assert mapping is not None, "`_lay_out` has mapped the slots"
            # pin only this slot, in the thread that copies, because pinning takes 0.05 s per GiB or more
            self._stager.register(mapping.memory, mapping.slot_bytes, slot * mapping.slot_bytes)
            self._write_frames(layout, slot)
            self._newest = ("", 0)
        return slot

    def _stage(
        self, staged: _Staged, layout: Layout, slot: int | None, begin: Callable[[], int | None], record: dict[str, Any]
    ) -> None:
        """Copy a snapshot in the background thread, and let the memory server checksum and sign the copy.

        Args:
            staged: the save.
            layout: layout of the snapshot.
            slot: slot to copy to; None if `begin` must be called first, which returns the slot.
            begin: returns a free slot; None if the save is skipped.
            record: fields of the manifest.
        """
        if slot is None and (slot := begin()) is None:
            staged.skipped = True
            return
        sources, destinations, left = layout.locals, self._views[slot], self._later
        at_rest = self._stager.device is None and not any(source.is_cuda for source in sources)
        on_way = self._room.enough() and at_rest
        known = self._store_frozen(slot, layout, record)
        began = time.monotonic()
        if on_way:
            copied = self._overlapped_copy(layout, slot).run(self._unthrottle, known)
            self._room.copied_overlapped(time.monotonic() - began, copied.nbytes, layout.plan.nbytes)
            record["checked"] = [copied.nbytes, crc_text(copied.checksum)]
            left = [i for i in left if i >= copied.items]
        self._stager.copy([sources[i] for i in left], [destinations[i] for i in left])
        self._newest = staged.save_id, slot
        if not on_way:
            self._room.copied(time.monotonic() - began)
        if staged.changed() is None and self._is_good(staged.step):
            self._client.seal(self._rank, slot, record | {"provisional": True})
            staged.sealed = True
        if self._stager.device is None:  # a comparison is valid only if no device changes tensors during it
            staged.samples = self._samples_of(layout, slot)

    def _overlapped_copy(self, layout: Layout, slot: int) -> OverlappedCopy:
        if slot not in self._overlapped:
            image, now = self._image(layout, slot), frozenset(self._now)
            first = self._frozen.items if self._frozen is not None else 0
            self._overlapped[slot] = OverlappedCopy(layout.plan, layout.locals, self._views[slot], image, now, first)
        return self._overlapped[slot]

    def _store_frozen(self, slot: int, layout: Layout, record: dict[str, Any]) -> tuple[int, int]:
        """Store the frozen parameters in a slot, and their checksum in `record`; see `FrozenPrefix.store`."""
        assert self._frozen is not None, "`_lay_out` has set it"
        known = self._frozen.store(slot, self._image(layout, slot), self._views[slot], self._stager)
        record["checked"] = [known[0], crc_text(known[1])]
        if known[0]:  # frozen parameters are not sent again to nodes that already have them
            record["extras"]["frozen"] = record["checked"]
        return known

    def _overlapped_items(self) -> list[int]:
        """Return the indices of the layout's items that may be copied in the background."""
        assert self._frozen is not None, "`_lay_out` has set it"
        return [*range(self._frozen.items), *self._later]

    def differing(self, save_id: str) -> str | None:
        """Compare samples of the live tensors with the last snapshot; return the name of a tensor that differs.

        Return None if no sample differs, if `save_id` is not the last snapshot, or if a device may change the tensors.
        """
        if (
            self._newest[0] != save_id
            or self._layout is None
            or self._mapping is None
            or self._stager.device is not None
        ):
            return None
        return self._samples_of(self._layout, self._newest[1]).differing()

    def _samples_of(self, layout: Layout, slot: int) -> CopySamples:
        if slot not in self._samples:
            overlapped = self._overlapped_items()
            names = [layout.plan.items[i].fqn for i in overlapped]
            copied = [(layout.locals[i], self._views[slot][i]) for i in overlapped]
            self._samples[slot] = CopySamples(names, [source for source, _ in copied], [into for _, into in copied])
        return self._samples[slot]

    def stepped(self) -> None:
        """Report to the node's memory server that a step without a save is done."""
        with contextlib.suppress(MemoryLostError):  # ignore the loss: the next save will connect to a new memory server
            self._client.stepped(self._rank)

    @_with_the_next_server
    def wait_staged(self) -> bool:
        """Wait until the last save is copied. Return False if the save was skipped, or if its snapshot was dropped.

        After the call the state may change, and the snapshot survives the death of this process. If the state has
        changed during the copy, the copy may be inconsistent, so the snapshot is dropped.
        """
        if self._background is None:
            return True
        if self._staged is not None:
            self._room.waited(time.monotonic() - self._staged.began)
        self._unthrottle.set()
        self._background.wait()
        staged, self._staged = self._staged, None
        if staged is None:
            return True
        changed = staged.changed()
        if staged.sealed:
            self._client.resolve(self._rank, staged.save_id, keep=changed is None)
        if changed is not None:
            self._overlap = False
            self._client.flush()
            self._client.forget_slot()  # the slot assigned to the next save may now hold the newest snapshot
            warnings.warn(
                f"{changed} was changed while step {staged.step} was being copied, but not by the optimizer: this "
                "snapshot is dropped, and later snapshots are copied before the next step begins, as with "
                "checkpoint.overlap: false",
                RuntimeWarning,
                stacklevel=2,
            )
        return changed is None and not staged.skipped

    @_with_the_next_server
    def move(self, rank: int, world_size: int) -> None:
        """Save as `rank` of `world_size` ranks from now on. Existing snapshots stay unchanged."""
        self.flush()
        if rank != self._rank:
            self._rank, self._mapping, self._layout = rank, self._client.attach(rank), None
        self._world_size = world_size
        self._client.forget_slot()

    @_with_the_next_server
    def busy(self) -> bool:
        """Return whether the last save is still being copied, checksummed or signed."""
        return (self._background is not None and not self._background.idle) or self._client.busy()

    @_with_the_next_server
    def flush(self) -> bool:
        """Wait until the memory server has signed the last save. Return False if the save was lost because the memory
        server has ended."""
        self.wait_staged()
        self._client.flush()
        return not self._lost

    def own_slots(self) -> tuple[memoryview, int, int] | None:
        """Return the memory of this rank's slots, the size of a slot, and the size of a snapshot; None before a
        save."""
        if self._mapping is None or self._layout is None:
            return None
        return self._mapping.memory, self._mapping.slot_bytes, self._layout.plan.nbytes

    def _lay_out(self, parts: Parts, changing: Callable[[torch.Tensor], bool]) -> Layout:
        """Return the layout of a state. If the layout has changed, map slots for it, and make views of their tensors.

        Args:
            parts: the state, as split by `tree.take_apart`.
            changing: see `save`.
        """
        if self._layout is not None and self._rebind(self._layout, parts):
            return self._layout
        layout, before = Layout(parts), self._layout
        if before is None or self._mapping is None or before.plan.digest != layout.plan.digest:
            if self._mapping is None or self._mapping.slot_bytes < layout.plan.nbytes:
                self._mapping = self._client.map(self._rank, layout.plan.nbytes)
            mapping = self._mapping
            self._client.add_plan(layout.plan)
            starts = [slot * mapping.slot_bytes for slot in range(mapping.slots)]
            self._views = [views(layout.plan, mapping.memory, start) for start in starts]
            self._framed, self._room = set(), Room()
        self._now = [i for i, item in enumerate(layout.plan.items) if changing(parts.tensors[item.tensor])]
        now = set(self._now)
        frozen = next((i for i in range(layout.frozen) if i in now), layout.frozen)
        self._frozen = FrozenPrefix(layout, frozen)
        self._later = [i for i in range(frozen, len(layout.plan.items)) if i not in now]
        self._layout, self._live = layout, parts
        self._mutation_check, self._overlapped, self._samples = None, {}, {}
        return layout

    def _rebind(self, layout: Layout, parts: Parts) -> bool:
        """Return whether the tensors of `parts` fit the layout; if so, make later copies read from these tensors."""
        replaced = _rebind(layout, self._live, parts) if self._live is not None else None
        if replaced is None:
            return False
        if replaced:
            self._mutation_check, self._overlapped, self._samples = None, {}, {}
        self._live = parts
        return True

    def _write_frames(self, layout: Layout, slot: int) -> None:
        """Write the bytes of a snapshot that are not tensor values, at the first use of a slot."""
        if slot not in self._framed:
            layout.write_frames(self._image(layout, slot))
            self._framed.add(slot)

    def _image(self, layout: Layout, slot: int) -> memoryview:
        """Return the bytes of a slot that contain the snapshot."""
        assert self._mapping is not None, "`_lay_out` has mapped the slots"
        start = slot * self._mapping.slot_bytes
        return self._mapping.memory[start : start + layout.plan.nbytes]

    # --- restoring ------------------------------------------------------------------------------

    def load(self, owner: int, save_id: str) -> Snapshot:
        """Return a snapshot from this node's memory server, with a verified manifest.

        The snapshot's bytes are verified when they are read.

        Args:
            owner: rank that saved the snapshot.
            save_id: save ID of the commit.

        Raises:
            NotFoundError: there is no such snapshot, or it was lost because the memory server has ended.
            CorruptSnapshotError: the manifest was not signed by this job.
        """
        self.wait_staged()
        self._client.forget_slot()
        secret, job, turned = self._secret, self._job, False
        while True:
            plan, mapped = self._layout.plan if self._layout is not None else None, self._mapping
            try:
                held = self._client.open(owner, save_id, secret=secret, job=job, mapped=mapped, plan=plan)
                break
            except MemoryLostError:  # if only the connection broke, the same server still has the snapshot
                self._turn_to_the_next_server()
                turned = True
            except NotFoundError as error:
                if not turned:
                    raise
                what = f"snapshot {save_id} of rank {owner} was lost when the memory server of this node ended"
                raise NotFoundError(what) from error
        return Snapshot.of(held.manifest, held.plan, lambda: held.image)

    def find(self, owner: int, save_id: str, addresses: Iterable[tuple[str, int]]) -> Snapshot:
        """Return a snapshot from this node, or from the first memory server at `addresses` that has the snapshot.

        Raises:
            NotFoundError: no memory server has the snapshot.
        """
        try:
            return self.load(owner, save_id)
        except NotFoundError:
            for address in addresses:
                with contextlib.suppress(NotFoundError):
                    return self.read_peer(address, owner, save_id)
            raise

    def restore(self, parts: Parts, snapshots: Sequence[Snapshot]) -> Any:
        """Fill live tensors from verified snapshots, and return the saved state (see `snapshot.fill`)."""
        known = self._layout is not None and self._rebind(self._layout, parts)
        may_populate = self._mapping.may_populate if self._mapping is not None else threading.Event()
        may_populate.clear()
        try:
            return fill(parts, snapshots, self._layout if known else None)
        finally:
            may_populate.set()

    @_with_the_next_server
    def read_peer(self, address: tuple[str, int], owner: int, save_id: str) -> Snapshot:
        """Return a snapshot that is read from the memory server of another node, at `address`."""
        self.wait_staged()
        self._client.forget_slot()
        peer = self._peer(address)
        manifest, plan = peer.open(owner, save_id, job=self._job)

        def load() -> memoryview:
            image = memoryview(bytearray(plan.nbytes))
            peer.read_scattered(owner, save_id, [(0, image)], plan.nbytes)
            return image

        def scatter(pieces: Sequence[tuple[int, memoryview]]) -> int:
            return peer.read_scattered(owner, save_id, pieces, plan.nbytes)

        def read_parts(parts: Sequence[tuple[int, memoryview]]) -> None:
            peer.read_parts(owner, save_id, parts, plan.nbytes)

        return Snapshot.of(manifest, plan, load, scatter, read_parts=read_parts)

    def _peer(self, address: tuple[str, int]) -> PeerClient:
        if address not in self._peers:
            self._peers[address] = PeerClient(*address, self._secret, encrypted=self._encrypted)
        return self._peers[address]

    @_with_the_next_server
    def rebuild(self, addresses: Mapping[int, tuple[str, int]], lost: int, save_id: str) -> Snapshot:
        """Return the snapshot of a rank whose node is lost, rebuilt from other ranks' snapshots and parity.

        Args:
            addresses: for each other rank of the parity group, the address of its node's memory server.
            lost: the rank whose snapshot is lost.
            save_id: save ID of the commit.

        Raises:
            NotFoundError: a memory server no longer has the snapshot of its rank, or the parity.
            CorruptSnapshotError: a manifest was not signed by this job, or the manifests differ.
        """
        self.wait_staged()
        self._client.forget_slot()
        peers = {rank: self._peer(address) for rank, address in addresses.items()}
        rebuilt = Rebuilt.open(peers, lost, save_id, job=self._job)
        return Snapshot.of(rebuilt.manifest, rebuilt.plan, rebuilt.load)

    def close_peers(self) -> None:
        """Close the connections to other nodes' memory servers. Each connection takes a thread of its memory server."""
        for peer in self._peers.values():
            peer.close()

    @_with_the_next_server
    def fetch(self, url: str, folder: str, rank: int) -> Snapshot:
        """Return a snapshot from a checkpoint in a durable tier.

        The snapshot's bytes are read when they are needed, through this node's memory server, which verifies their MAC.
        A checkpoint written by an earlier version of hyperpod_ext has no MAC, and causes a warning.

        Args:
            url: URL of the durable tier.
            folder: folder of the checkpoint in the tier.
            rank: rank whose snapshot is read.
        """
        self.wait_staged()
        self._client.forget_slot()
        manifest, plan, bound = self._client.fetch_head(url, folder, rank, secret=self._secret, job=self._job)
        if not bound:
            warnings.warn(f"{url}/{folder}: {UNBOUND}", RuntimeWarning, stacklevel=2)

        return Snapshot.of(manifest, plan, lambda: self._fetch_image(url, folder, rank), bound=bound)

    @_with_the_next_server
    def _fetch_image(self, url: str, folder: str, rank: int) -> memoryview:
        return self._client.fetch(url, folder, rank, secret=self._secret, job=self._job).image


@dataclass
class _Staged:
    """A save that is copied in the background."""

    step: int
    save_id: str
    mutation_check: MutationCheck
    versions: list[int]
    began: float = 0.0
    samples: CopySamples | None = None
    """Comparison of the copy with the tensors; None until the copy is complete, or if a device may change tensors."""
    sealed: bool = False
    skipped: bool = False
    """Whether nothing was copied, because no slot was free or the step is invalid."""

    def changed(self) -> str | None:
        """Return the name of a tensor that has changed since the save began, or differs from its copy; None if there
        is no such tensor."""
        changed = self.mutation_check.changed(self.versions)
        return self.samples.differing() if changed is None and self.samples is not None else changed


def _rebind(layout: Layout, known: Parts, now: Parts) -> int | None:
    """Replace each tensor of a layout that is a different object in `now` than in `known`; return the number of
    replaced tensors.

    Returns None, possibly after some replacements, if a tensor of `now` does not fit the layout.

    Args:
        layout: the layout, changed in place.
        known: the split state that has the layout's present tensors.
        now: the present split state.
    """
    if known.shape != now.shape:
        return None
    replaced = 0
    for item_index, item in enumerate(layout.plan.items):
        tensor, local = now.tensors[item.tensor], layout.locals[item_index]
        plain = type(tensor) in _PLAIN
        inner = tensor if plain else getattr(tensor, "_local_tensor", tensor)  # `tensor.data = other` replaces `inner`
        if tensor is known.tensors[item.tensor] and inner.dtype == local.dtype and inner.is_set_to(local):
            continue
        if not plain or tensor.dtype != local.dtype:
            return None
        if tensor.shape != local.shape or tensor.stride() != local.stride():
            return None
        layout.locals[item_index] = tensor.detach()
        replaced += 1
    return replaced
