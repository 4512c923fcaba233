"""Restore live tensors from snapshots, also if the snapshots were saved with another number of ranks."""

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
"""A function that reads all bytes of a snapshot, and returns the CRC64-NVME of these bytes.

The argument lists the parts of the snapshot to keep, as pairs of the part's offset and the memory to write to."""

ReadParts = Callable[[Sequence[tuple[int, memoryview]]], None]
"""A function that reads parts of a snapshot on another node, whose memory server has verified the bytes.

The argument lists the parts to read, as pairs of the part's offset and the memory to write to."""


@dataclass(frozen=True)
class Snapshot:
    """One rank's saved state at one step, which this process can read."""

    step: int
    plan: Plan
    values: Sequence[Any]
    load: Callable[[], memoryview]
    """Function that returns the snapshot's bytes. The returned memoryview keeps the memory alive."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    manifest: Mapping[str, Any] | None = None
    """Manifest with the checksum of the snapshot; None if the bytes are already verified."""
    scatter: Scatter | None = None
    """Function that reads a snapshot on another node directly into the tensors, without a local copy; None for a local
    snapshot."""
    read_parts: ReadParts | None = None
    """Function that reads only parts of a snapshot on another node; None for a local snapshot."""
    bound: bool = True
    """Whether a MAC proves that this job has written the checkpoint."""
    others: Callable[[], Sequence[Snapshot]] | None = None
    """Function that returns the other ranks' snapshots of the same commit; None if these snapshots are not needed or
    already loaded."""

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
        """Return a snapshot whose manifest is already verified. The snapshot's bytes are verified when they are
        read."""
        extras = manifest.get("extras", {})
        step, values = int(manifest["step"]), manifest["values"]
        return cls(step, plan, values, load, extras, manifest, scatter, read_parts, bound, others)

    @cached_property
    def image(self) -> memoryview:
        return self.load()

    @property
    def was_read(self) -> bool:
        """Whether the snapshot's bytes were read into this process."""
        return "image" in self.__dict__

    @property
    def nbytes_read(self) -> int:
        """Number of the snapshot's bytes that were read into this process, without bytes read by `scatter`."""
        return self.plan.nbytes if self.was_read else sum(self._parts_read)

    @cached_property
    def _parts_read(self) -> list[int]:
        return []

    def check(self) -> None:
        """Raise CorruptSnapshotError if the snapshot's bytes do not have the length and checksum in the manifest."""
        if self.manifest is not None:
            check_bytes(self.manifest, self.image)

    def shards(
        self, targets: Mapping[str, Sequence[Item]], known: Collection[tuple[str, tuple[int, ...]]]
    ) -> list[tuple[Item, torch.Tensor]]:
        """Return the verified shards of this snapshot that the targets need.

        From a snapshot on another node, only the needed parts are read. From a local snapshot, all shards are returned.

        Args:
            targets: items to restore, by tensor name.
            known: tensor name and offsets of shards that were read from other snapshots. A large shard that was read
                from another snapshot is not read again.
        """
        if self.read_parts is None or self.was_read:
            self.check()
            return list(zip(self.plan.items, views(self.plan, self.image), strict=True))
        items = parts_for(targets, self.plan.items, known)
        return list(zip(items, self.read(items), strict=True))

    def read(self, items: Sequence[Item]) -> list[torch.Tensor]:
        """Return the verified values of `items`, which are shards or parts of shards.

        From a snapshot on another node, no other bytes are read.
        """
        if self.read_parts is None or self.was_read:
            self.check()
            return [view(self.image[item.data : item.data + item.nbytes], item) for item in items]
        buffers = [bytearray(item.nbytes) for item in items]
        self.read_parts([(item.data, memoryview(buffer)) for item, buffer in zip(items, buffers, strict=True)])
        self._parts_read.append(sum(map(len, buffers)))
        return [view(buffer, item) for item, buffer in zip(items, buffers, strict=True)]


Like = Callable[[Path], torch.Tensor | None]
"""A function that takes the path of a saved tensor, and returns the parameter to which the tensor belongs. The tensor
that is made for the saved tensor gets the sharding, strides and device of the returned parameter. The function returns
None if there is no such parameter."""


def fill(
    live: Parts,
    snapshots: Sequence[Snapshot],
    layout: Layout | None = None,
    *,
    lean: bool = False,
    like: Like = lambda path: None,
    kept: Container[str] = (),
) -> Any:
    """Return the saved state, with tensors filled from `snapshots`.

    A live tensor with the name, type, shape and strides of a saved tensor is filled in place. For a saved tensor
    without a matching live tensor, a new tensor is created, sharded as the parameter that `like` returns. Live tensors
    that were not saved stay unchanged. The first snapshot is used alone if it holds all needed shards; otherwise the
    shards are assembled from the snapshots of all ranks.

    All read bytes are verified. After an error, the contents of the live tensors are undefined, and the state must not
    be used.

    Args:
        live: the split state of the live objects.
        snapshots: this rank's snapshot, or the snapshots of all ranks of another world size.
        layout: layout of the live tensors; None to compute it.
        lean: read only the needed snapshots, and do not compare replicas.
        like: returns the parameter to which a saved tensor belongs.
        kept: names of objects whose live tensors are filled even if they have another type or other strides.

    Raises:
        CorruptSnapshotError: the read bytes do not have the checksum in the manifest.
        JobFailedError: the snapshots hold only a part of a tensor, or a tensor with another shape.
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
        JobFailedError: only some ranks have saved an optimizer's state for a parameter, so it cannot be resharded.
    """
    first, *others = snapshots
    for other in others:
        if other.plan.shape == first.plan.shape:
            continue
        names = set(leaf_paths(first.plan.shape)[0]).symmetric_difference(leaf_paths(other.plan.shape)[0])
        if apart := sorted(fqn(path) for path in names if like(path) is not None):
            raise JobFailedError(
                f"{', '.join(apart[:3])}: only some ranks have saved this state, so it cannot be resharded for another "
                "number of ranks",
                hint="Continue with the same number of ranks and the same sharding.",
            )


def _lacks_forms(saved: Plan, live: Parts, like: Like) -> bool:
    """Return whether the plan lacks the needed type and shape of a tensor, because the saving rank had no shard of it.

    Type and shape are needed only for a tensor that has no live tensor and does not belong to a DTensor parameter.
    """
    held, known = {item.tensor for item in saved.items}, set(leaf_paths(live.shape)[0])
    apart = [path for at, path in enumerate(leaf_paths(saved.shape)[0]) if at not in held and path not in known]
    return not all(is_dtensor(like(path)) for path in apart)


def _places(
    live: Parts, layout: Layout | None, snapshots: Sequence[Snapshot], like: Like, kept: Container[str]
) -> list[torch.Tensor]:
    """Return the tensor to fill for each saved tensor: the live tensor of the same name if it fits, or a new tensor."""
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
            raise JobFailedError(f"{fqn(path)}: none of the available snapshots has a part of this tensor")
    return places


def _fits(here: Form, saved: Item, any_form: bool) -> bool:
    return here == saved.form or (any_form and here.shape == saved.shape)


def _fill_expanded(place: torch.Tensor, filled: torch.Tensor, name: str) -> None:
    """Copy saved values into a view made by `expand`, in which several elements share memory.

    Args:
        place: the expanded view.
        filled: the saved values.
        name: the tensor's name, for errors.

    Raises:
        JobFailedError: elements that share memory were saved with different values.
    """
    with torch.no_grad():
        once(place, place).copy_(once(filled, place))
    if not torch.equal(_raw(place.cpu().clone(memory_format=torch.contiguous_format)), _raw(filled)):
        raise JobFailedError(
            f"{name} is an expanded view here (strides {place.stride()}), but its elements were saved with different "
            "values",
            hint="Call .contiguous() on the tensor when it is built.",
        )


def _holds_all(saved: Plan, live: Plan) -> bool:
    """Return whether a snapshot alone has all values that a rank needs, without the other ranks' snapshots.

    Args:
        saved: the plan of the snapshot.
        live: the plan of the rank's live tensors.
    """
    lacks = sum(node == "T" for node in saved.shape) > len(saved.items)  # the saving rank had no shard of a tensor
    if not lacks and all(item.sizes == item.shape for item in saved.items):
        return True
    named, known = {item.fqn: item for item in saved.items}, {item.fqn for item in live.items}
    if lacks or any(item.sizes != item.shape for item in saved.items if item.fqn not in known):
        return False
    mine = [(item, named.get(item.fqn)) for item in live.items]
    return all(own is not None and (own.shape != item.shape or _within(item, own)) for item, own in mine)


def needed(targets: Sequence[Item], snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return snapshots that together hold all shards in `targets`. Among replicas of a shard, prefer a local snapshot.

    Args:
        targets: the shards to restore.
        snapshots: one snapshot of each rank.
    """
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
    for holders in unsharded:  # the lowest rank's values count if values differ
        if not (alike and chosen.intersection(holders)):
            chosen.add(holders[0])
    return [snapshots[index] for index in sorted(chosen)] or list(snapshots[:1])


def _hold_the_same(snapshots: Sequence[Snapshot]) -> bool:
    """Return whether all snapshots have the same digest of the state that may differ between ranks."""
    digests = {snapshot.manifest.get("own_digest") if snapshot.manifest else None for snapshot in snapshots}
    return len(digests) == 1 and not digests & {None, ""}


def _copy_image(snapshot: Snapshot, layout: Layout) -> None:
    """Copy a snapshot into live tensors of the same layout, and verify the snapshot's checksum in the same pass.

    Raises:
        CorruptSnapshotError: the bytes do not have the checksum in the manifest.
    """
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
    for snapshot in used:  # verify all shards before copying one
        shards.append(snapshot.shards(targets, {(item.fqn, item.offsets) for each in shards for item, _ in each}))
    for each in shards:
        for item, shard in each:
            if not _add_part(sources.setdefault(item.fqn, []), item, shard):
                differing.append(item.fqn)
    if differing:
        names = ", ".join(sorted(set(differing))[:5])
        warnings.warn(
            f"{names}{' and more' if len(set(differing)) > 5 else ''} differed between ranks when saved; with the new "
            "world size, every rank gets the values of the lowest rank",
            RuntimeWarning,
            stacklevel=2,
        )
    for item, destination in zip(layout.plan.items, layout.locals, strict=True):
        parts = sources.get(item.fqn, [])
        if not parts:
            raise JobFailedError(
                f"{item.fqn} is not in the snapshot", hint="Restore with the model and optimizer of the saving job."
            )
        if parts[0][0].shape != item.shape:
            raise JobFailedError(
                f"{item.fqn} has shape {item.shape} here and {parts[0][0].shape} in the snapshot",
                hint="Restore with the model and optimizer of the saving job.",
            )
        covered = 0
        for at, (source, shard) in enumerate(parts):
            copied = _copy_overlap(item, destination, source, shard)
            covered += 0 if any(_within(source, other) for other, _ in parts[:at]) else copied
        if covered != destination.numel():
            raise JobFailedError(
                f"{item.fqn}: the available snapshots have {covered} of the {destination.numel()} elements that this "
                "rank needs"
            )


def _add_part(known: list[tuple[Item, torch.Tensor]], item: Item, shard: torch.Tensor) -> bool:
    """Add a shard to the `known` shards of a tensor; return False if its values differ from an overlapping shard.

    `known` is in the order in which shards are copied. Of two overlapping shards, the shard that was added first is
    copied last, so its values are kept. The shard that was added first may be smaller, if only some of its rows were
    read.
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
    """Return whether the elements of `item` are a subset of the elements of `other`."""
    return all(
        start >= their_start and start + size <= their_start + their_size
        for start, size, their_start, their_size in zip(
            item.offsets, item.sizes, other.offsets, other.sizes, strict=True
        )
    )


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes, for comparisons in which NaN equals NaN."""
    return tensor.reshape(-1).view(torch.uint8)


def _differing_values(snapshots: Sequence[Snapshot]) -> list[str]:
    """Return the names of plain values that differ between snapshots with the same structure as the first snapshot."""
    first = snapshots[0]
    _, paths = leaf_paths(first.plan.shape)
    others = [snapshot for snapshot in snapshots[1:] if snapshot.plan.shape == first.plan.shape]
    return [
        fqn(path) for index, path in enumerate(paths) if any(s.values[index] != first.values[index] for s in others)
    ]


def _copy_overlap(target: Item, destination: torch.Tensor, source: Item, view: torch.Tensor) -> int:
    """Copy the elements that are in both items, from `view` to `destination`; return the number of elements.

    Args:
        target: the shard in `destination`.
        destination: the tensor to fill.
        source: the shard in `view`.
        view: the tensor to copy from.
    """
    if (shared := _overlap(target, destination, source, view)) is None:
        return 0
    with torch.no_grad():
        shared[0].copy_(shared[1])
    return shared[0].numel()


def _overlap(
    target: Item, destination: torch.Tensor, source: Item, view: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return views of the elements that both shards contain, one in each tensor; None if the shards do not overlap."""
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
