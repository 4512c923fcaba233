"""Restore live tensors from snapshots, with the same or another world size."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.snapshot.fast_copy import bytes_of, copy_checked, copy_to_gpu_checked, is_memory
from hyperpod_ext.runtime.snapshot.image import Layout, empty, form_of, is_dtensor, once, view, views
from hyperpod_ext.runtime.snapshot.layout_plan import Item, Plan
from hyperpod_ext.runtime.snapshot.manifest import check_bytes, check_crc, crc64nvme
from hyperpod_ext.runtime.snapshot.part_reads import by_name, meet, parts_for
from hyperpod_ext.runtime.snapshot.tree import Form, Parts, Path, fqn, leaf_paths, put_together

Scatter = Callable[[Sequence[tuple[int, memoryview]]], int]
"""Reads a whole image, each piece (its start, writable bytes) into its destination; returns the CRC64."""

ReadParts = Callable[[Sequence[tuple[int, memoryview]]], None]
"""Reads parts (start, writable bytes) of an image that its holder has verified."""


@dataclass(frozen=True)
class Snapshot:
    """One rank's state at one step, in a place that this process can read."""

    step: int
    plan: Plan
    values: Sequence[Any]
    load: Callable[[], memoryview]
    """Returns the image, which keeps its memory alive."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    manifest: Mapping[str, Any] | None = None
    """Manifest to verify the bytes against; None: already verified."""
    scatter: Scatter | None = None
    """For a remote image: reads into the destinations without a local image."""
    read_parts: ReadParts | None = None
    """For a remote image: reads parts of it."""
    bound: bool = True
    """False: the checkpoint has no MAC that proves that the job wrote it."""
    others: Callable[[], Sequence[Snapshot]] | None = None
    """Returns the snapshots of the commit's other ranks. None: this snapshot suffices, or all are passed."""

    @classmethod
    def of(
        cls,
        manifest: Mapping[str, Any],
        plan: Plan,
        load: Callable[[], memoryview],
        scatter: Scatter | None = None,
        *,
        read_parts: ReadParts | None = None,
        bound: bool = True,
        others: Callable[[], Sequence[Snapshot]] | None = None,
    ) -> Snapshot:
        """Return a snapshot with a verified manifest; its bytes are verified when they are read."""
        extras = manifest.get("extras", {})
        step, values = int(manifest["step"]), manifest["values"]
        return cls(step, plan, values, load, extras, manifest, scatter, read_parts, bound, others)

    @cached_property
    def image(self) -> memoryview:
        return self.load()

    @property
    def was_read(self) -> bool:
        """Whether the image was read into this process."""
        return "image" in self.__dict__

    @property
    def nbytes_read(self) -> int:
        """Bytes of the image read into this process, not counting `scatter`."""
        return self.plan.nbytes if self.was_read else sum(self._parts_read)

    @cached_property
    def _parts_read(self) -> list[int]:
        return []

    def check(self) -> None:
        """Raise CorruptSnapshotError if the bytes differ from the sealed ones."""
        if self.manifest is not None:
            check_bytes(self.manifest, self.image)

    def shards(
        self, targets: Mapping[str, Sequence[Item]], known: Collection[tuple[str, tuple[int, ...]]]
    ) -> list[tuple[Item, torch.Tensor]]:
        """Return this snapshot's shards of the targets' tensors, verified.

        From a remote image, read only the parts that the targets need, without large `known` shards.
        """
        if self.read_parts is None or self.was_read:
            self.check()
            return list(zip(self.plan.items, views(self.plan, self.image), strict=True))
        items = parts_for(targets, self.plan.items, known)
        return list(zip(items, self.read(items), strict=True))

    def read(self, items: Sequence[Item]) -> list[torch.Tensor]:
        """Return these shards or parts of shards, verified. From a remote image, read nothing else."""
        if self.read_parts is None or self.was_read:
            self.check()
            return [view(self.image[item.data : item.data + item.nbytes], item) for item in items]
        buffers = [bytearray(item.nbytes) for item in items]
        self.read_parts([(item.data, memoryview(buffer)) for item, buffer in zip(items, buffers, strict=True)])
        self._parts_read.append(sum(map(len, buffers)))
        return [view(buffer, item) for item, buffer in zip(items, buffers, strict=True)]


Like = Callable[[Path], torch.Tensor | None]
"""Returns a model tensor with the shards, strides and device of a saved tensor's path: optimizer state's parameter."""


def fill(
    live: Parts,
    snapshots: Sequence[Snapshot],
    layout: Layout | None = None,
    *,
    lean: bool = False,
    like: Like = lambda path: None,
    kept: Container[str] = (),
) -> Any:
    """Return the saved tree, with tensors filled from `snapshots`.

    A live tensor of the same name, type, shape and strides is filled in place; other saved tensors get a new tensor,
    sharded like `like`. Live tensors that were not saved stay unchanged. One snapshot suffices if it holds all parts
    of these tensors; otherwise each shard is cut from the snapshots of all ranks.

    Args:
        layout: the live tensors' layout, if known.
        lean: skip snapshots that are not needed, without comparing replicas.
        kept: first keys of the tree; below them, live tensors of another type or other strides are filled, too.

    Every byte is verified. After an error the live tensors are undefined, and the state must not be used.

    Raises:
        CorruptSnapshotError: the bytes differ from the sealed ones.
        JobFailedError: the snapshots hold a tensor only in part, or with another shape.
    """
    first = snapshots[0]
    if first.others is not None and _lacks_forms(first.plan, live, like):
        snapshots = [first, *first.others()]
    places = _places(live, layout, snapshots, like, kept)
    expanded = [at for at, place in enumerate(places) if once(place, place).shape != place.shape]
    tensors = [torch.empty(p.shape, dtype=p.dtype) if at in expanded else p for at, p in enumerate(places)]
    if layout is None or live.shape != first.plan.shape or any(map(operator.is_not, tensors, live.tensors)):
        layout = Layout(Parts(first.plan.shape, tensors, list(first.values)))
    if [item.place for item in layout.plan.items] == [item.place for item in first.plan.items]:
        _copy_image(first, layout)
    else:
        if len(snapshots) == 1 and first.others is not None and not _holds_all(first.plan, layout.plan):
            snapshots = [first, *first.others()]
        _check_entries(snapshots, like)
        used = needed(layout.plan.items, snapshots) if lean else snapshots
        _reshard(layout, used, snapshots)
    for at in expanded:
        _fill_expanded(places[at], tensors[at], fqn(leaf_paths(first.plan.shape)[0][at]))
    return put_together(first.plan.shape, places, first.values)


def _check_entries(snapshots: Sequence[Snapshot], like: Like) -> None:
    """
    Raises:
        JobFailedError: an optimizer had a parameter's state only on some ranks, so other ranks cannot get a part of it.
    """
    first, *others = snapshots
    for other in others:
        if other.plan.shape == first.plan.shape:
            continue
        names = set(leaf_paths(first.plan.shape)[0]).symmetric_difference(leaf_paths(other.plan.shape)[0])
        if apart := sorted(fqn(path) for path in names if like(path) is not None):
            raise JobFailedError(
                f"{', '.join(apart[:3])}: only some ranks have saved this; it cannot be cut for other ranks",
                hint="Go on with as many ranks, sharded in the same way.",
            )


def _lacks_forms(saved: Plan, live: Parts, like: Like) -> bool:
    """Return whether type and shape of a saved tensor are unknown, because the saving rank had no part of it."""
    held, known = {item.tensor for item in saved.items}, set(leaf_paths(live.shape)[0])
    apart = [path for at, path in enumerate(leaf_paths(saved.shape)[0]) if at not in held and path not in known]
    return not all(is_dtensor(like(path)) for path in apart)


def _places(
    live: Parts, layout: Layout | None, snapshots: Sequence[Snapshot], like: Like, kept: Container[str]
) -> list[torch.Tensor]:
    """Return a tensor for each saved tensor: the live one of its name if it fits, otherwise a new one."""
    live_ones = {path: (at, live.tensors[at]) for at, path in enumerate(leaf_paths(live.shape)[0])}
    forms = {} if layout is None else {item.tensor: item.form for item in layout.plan.items}
    first, *others = snapshots
    own = {item.tensor: item for item in first.plan.items}
    theirs = {item.fqn: item for other in reversed(others) for item in other.plan.items}
    places = []
    for index, path in enumerate(leaf_paths(first.plan.shape)[0]):
        saved, model = own.get(index) or theirs.get(fqn(path)), like(path)
        at, known = live_ones.get(path, (-1, None))
        if known is not None and (saved is None or _fits(forms.get(at) or form_of(known), saved, path[0] in kept)):
            places.append(known)
        elif model is not None and is_dtensor(model) and (saved is None or model.shape == saved.shape):
            dtype = getattr(torch, saved.dtype) if saved is not None else None
            places.append(torch.empty_like(model, dtype=dtype, requires_grad=False))
        elif saved is not None:
            places.append(empty(saved.form, model.device if model is not None else None))
        else:
            raise JobFailedError(f"{fqn(path)}: no snapshot at hand holds any part of it")
    return places


def _fits(here: Form, saved: Item, any_form: bool) -> bool:
    return here == saved.form or (any_form and here.shape == saved.shape)


def _fill_expanded(place: torch.Tensor, filled: torch.Tensor, name: str) -> None:
    """Copy into a view with elements that share memory.

    Raises:
        JobFailedError: the elements were saved with different values.
    """
    with torch.no_grad():
        once(place, place).copy_(once(filled, place))
    if not torch.equal(_raw(place.cpu().clone(memory_format=torch.contiguous_format)), _raw(filled)):
        raise JobFailedError(
            f"{name} is an expanded view here (strides {place.stride()}), and was saved with a value of its own for "
            "each element",
            hint="Call .contiguous() on it where it is built.",
        )


def _holds_all(saved: Plan, live: Plan) -> bool:
    """Return whether this rank's snapshot suffices, without the other ranks' snapshots."""
    lacks = sum(node == "T" for node in saved.shape) > len(saved.items)  # tensors without a part on that rank
    if not lacks and all(item.sizes == item.shape for item in saved.items):
        return True
    named, known = {item.fqn: item for item in saved.items}, {item.fqn for item in live.items}
    if lacks or any(item.sizes != item.shape for item in saved.items if item.fqn not in known):
        return False
    mine = [(item, named.get(item.fqn)) for item in live.items]
    return all(own is not None and (own.shape != item.shape or _within(item, own)) for item, own in mine)


def needed(targets: Sequence[Item], snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return the snapshots, of one per rank, that together hold the targets; of replicas the nearest."""
    named = [{item.fqn: item for item in snapshot.plan.items} for snapshot in snapshots]
    chosen: set[int] = set()
    unsharded: list[list[int]] = []
    for target in targets:
        parts: dict[tuple[int, ...], int] = {}
        holders = [
            index for index, items in enumerate(named) if target.fqn in items and meet(target, items[target.fqn])
        ]
        if any(named[index][target.fqn].sizes == named[index][target.fqn].shape for index in holders):
            unsharded.append(holders)
            continue
        for index in holders:
            offsets = named[index][target.fqn].offsets
            known = parts.get(offsets)
            if known is None or (snapshots[known].scatter is not None and snapshots[index].scatter is None):
                parts[offsets] = index
        chosen.update(parts.values())
    alike = _hold_the_same(snapshots)
    for holders in unsharded:  # of values that may differ, every rank takes the lowest rank's
        if not (alike and chosen.intersection(holders)):
            chosen.add(holders[0])
    return [snapshots[index] for index in sorted(chosen)] or list(snapshots[:1])


def _hold_the_same(snapshots: Sequence[Snapshot]) -> bool:
    """Return whether the ranks have reported equal digests of the state that may differ between ranks."""
    digests = {snapshot.manifest.get("own_digest") if snapshot.manifest else None for snapshot in snapshots}
    return len(digests) == 1 and not digests & {None, ""}


def _copy_image(snapshot: Snapshot, layout: Layout) -> None:
    """Verify and copy in one pass, in the order of the image."""
    if snapshot.scatter is not None and snapshot.manifest is not None and all(map(is_memory, layout.locals)):
        places = [(i.data, bytes_of(t)) for i, t in zip(snapshot.plan.items, layout.locals, strict=True) if i.nbytes]
        check_crc(snapshot.manifest, snapshot.plan.nbytes, snapshot.scatter(places))
        return
    image, sources = snapshot.image, views(snapshot.plan, snapshot.image)
    if any(destination.is_cuda for destination in layout.locals):
        checksum = copy_to_gpu_checked(layout.locals, sources, image)
    else:
        checksum = _copy_checked(snapshot.plan.items, sources, layout.locals, image)
    if snapshot.manifest is not None:
        check_crc(snapshot.manifest, len(image), checksum)


def _copy_checked(
    items: Sequence[Item], sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], image: memoryview
) -> int:
    checksum = position = 0
    for item, source, destination in zip(items, sources, destinations, strict=True):
        checksum = crc64nvme(image[position : item.data], checksum)
        checksum = copy_checked(destination, source, checksum)
        position = item.data + item.nbytes
    return crc64nvme(image[position:], checksum)


def _reshard(layout: Layout, used: Sequence[Snapshot], snapshots: Sequence[Snapshot]) -> None:
    sources: dict[str, list[tuple[Item, torch.Tensor]]] = {}
    differing, targets = _differing_values(snapshots), by_name(layout.plan.items)
    shards: list[list[tuple[Item, torch.Tensor]]] = []
    for snapshot in used:  # all are verified before any is copied
        shards.append(snapshot.shards(targets, {(item.fqn, item.offsets) for each in shards for item, _ in each}))
    for each in shards:
        for item, shard in each:
            if not _add_part(sources.setdefault(item.fqn, []), item, shard):
                differing.append(item.fqn)
    if differing:
        names = ", ".join(sorted(set(differing))[:5])
        warnings.warn(
            f"{names}{' and more' if len(set(differing)) > 5 else ''} differed from rank to rank when saved; in the "
            "new world size, every rank gets the lowest rank's",
            RuntimeWarning,
            stacklevel=2,
        )
    for item, destination in zip(layout.plan.items, layout.locals, strict=True):
        parts = sources.get(item.fqn, [])
        if not parts:
            raise JobFailedError(
                f"{item.fqn} is not in the snapshot", hint="Restore with the model and optimizer that saved it."
            )
        if parts[0][0].shape != item.shape:
            raise JobFailedError(f"{item.fqn} has shape {item.shape} here and {parts[0][0].shape} in the snapshot")
        covered = 0
        for at, (source, shard) in enumerate(parts):
            copied = _copy_overlap(item, destination, source, shard)
            covered += 0 if any(_within(source, other) for other, _ in parts[:at]) else copied
        if covered != destination.numel():
            raise JobFailedError(f"{item.fqn}: the snapshots hold {covered} of the {destination.numel()} elements here")


def _add_part(known: list[tuple[Item, torch.Tensor]], item: Item, shard: torch.Tensor) -> bool:
    """Add a part of a tensor; return False if it differs from an overlapping part.

    The first part of an overlap counts, and is copied last. It may be the smaller one, if only some rows were read.
    """
    for at, (other, theirs) in enumerate(known):
        if item.shape != other.shape:
            if item.offsets == other.offsets:
                return False
        elif _within(item, other) or _within(other, item):
            if not _within(item, other):
                known.insert(at, (item, shard))
            shared = _overlap(item, shard, other, theirs)
            return shared is not None and torch.equal(_raw(shared[0]), _raw(shared[1]))
    known.append((item, shard))
    return True


def _within(item: Item, other: Item) -> bool:
    """Return whether `item` is inside `other`."""
    return all(
        start >= their_start and start + size <= their_start + their_size
        for start, size, their_start, their_size in zip(
            item.offsets, item.sizes, other.offsets, other.sizes, strict=True
        )
    )


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes, in which NaN equals NaN."""
    return tensor.reshape(-1).view(torch.uint8)


def _differing_values(snapshots: Sequence[Snapshot]) -> list[str]:
    """Return the names of plain values that differ between snapshots of one shape."""
    first = snapshots[0]
    _, paths = leaf_paths(first.plan.shape)
    others = [snapshot for snapshot in snapshots[1:] if snapshot.plan.shape == first.plan.shape]
    return [
        fqn(path) for index, path in enumerate(paths) if any(s.values[index] != first.values[index] for s in others)
    ]


def _copy_overlap(target: Item, destination: torch.Tensor, source: Item, view: torch.Tensor) -> int:
    """Copy the overlap of two items; return its number of elements."""
    if (shared := _overlap(target, destination, source, view)) is None:
        return 0
    with torch.no_grad():
        shared[0].copy_(shared[1])
    return shared[0].numel()


def _overlap(
    target: Item, destination: torch.Tensor, source: Item, view: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the views of the overlap in both tensors; None without an overlap."""
    for dimension in range(len(target.shape)):
        low = max(target.offsets[dimension], source.offsets[dimension])
        high = min(
            target.offsets[dimension] + target.sizes[dimension], source.offsets[dimension] + source.sizes[dimension]
        )
        if high <= low:
            return None
        destination = destination.narrow(dimension, low - target.offsets[dimension], high - low)
        view = view.narrow(dimension, low - source.offsets[dimension], high - low)
    return destination, view
