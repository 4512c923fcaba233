"""Snapshots as they come back, and how live tensors are filled from them, by the same or another world size."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.snapshot.fast_copy import bytes_of, copy_checked, is_memory
from hyperpod_ext.runtime.snapshot.image import Layout, views
from hyperpod_ext.runtime.snapshot.layout_plan import Item, Plan
from hyperpod_ext.runtime.snapshot.manifest import check_bytes, check_crc, crc64nvme
from hyperpod_ext.runtime.snapshot.tree import Parts, fqn, leaf_paths, put_together

Scatter = Callable[[Sequence[tuple[int, memoryview]]], int]
"""Reads a whole image, each piece (its start, writable bytes) straight to where it belongs; returns the CRC64."""


@dataclass(frozen=True)
class Snapshot:
    """One rank's state at one step, somewhere that this process can read."""

    step: int
    plan: Plan
    values: Sequence[Any]
    load: Callable[[], memoryview]
    """The image. What keeps its memory alive is bound to it."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    manifest: Mapping[str, Any] | None = None
    """What the bytes must be verified against; None: they have been."""
    scatter: Scatter | None = None
    """A way past the image, where that would have to be brought here first."""
    bound: bool = True
    """False: it comes from where others can write, and nothing proves that the job has written it."""

    @classmethod
    def of(
        cls,
        manifest: Mapping[str, Any],
        plan: Plan,
        load: Callable[[], memoryview],
        scatter: Scatter | None = None,
        *,
        bound: bool = True,
    ) -> Snapshot:
        """A snapshot with a verified manifest, whose bytes are verified when they are read."""
        extras = manifest.get("extras", {})
        return cls(int(manifest["step"]), plan, manifest["values"], load, extras, manifest, scatter, bound)

    @cached_property
    def image(self) -> memoryview:
        return self.load()

    @property
    def was_read(self) -> bool:
        """Whether its image was brought here."""
        return "image" in self.__dict__

    def check(self) -> None:
        """Raise CorruptSnapshotError where the bytes are not those that were sealed."""
        if self.manifest is not None:
            check_bytes(self.manifest, self.image)


def fill(live: Parts, snapshots: Sequence[Snapshot], layout: Layout | None = None, *, lean: bool = False) -> Any:
    """Copy the state of `snapshots` into the live tensors, and return the tree that was saved.

    Its tensors are the live ones where there are live ones of the name, and private copies elsewhere; its
    plain values are those that were saved. One snapshot serves when it was laid out as the live state is;
    otherwise each shard is cut from whichever snapshots hold parts of it. `layout` is the live state's, if known.
    `lean`: snapshots of which nothing is needed are not read, so nobody looks whether what should be equal is.

    Every byte is verified. After an error the live tensors hold anything, and the state must not be used.

    Raises:
        CorruptSnapshotError: bytes that are not those that were sealed.
        JobFailedError: a live tensor that no snapshot holds whole, or that has another shape.
    """
    layout = layout or Layout(live)
    first = snapshots[0]
    if layout.plan.items == first.plan.items:
        _copy_image(first, layout)
    else:
        used = needed(layout.plan.items, snapshots) if lean else snapshots
        for snapshot in used:
            snapshot.check()
        _reshard(layout, used)
    paths, _ = leaf_paths(live.shape)
    by_name = {fqn(path): tensor for path, tensor in zip(paths, live.tensors, strict=True)}
    saved, _ = leaf_paths(first.plan.shape)
    missing = {fqn(path) for path in saved} - by_name.keys()
    parts = _parts_of(snapshots) if missing else {}  # rarely: then all are read
    names = {item.tensor: item.fqn for item in first.plan.items}  # they tell whose part of a model a tensor is
    tensors = [
        _private(parts, names.get(index, fqn(path))) if fqn(path) in missing else by_name[fqn(path)]
        for index, path in enumerate(saved)
    ]
    return put_together(first.plan.shape, tensors, first.values)


def needed(targets: Sequence[Item], snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Those of the snapshots, one of each rank, that together hold what is to be filled; of copies the nearest."""
    by_name = [{item.fqn: item for item in snapshot.plan.items} for snapshot in snapshots]
    chosen: set[int] = set()
    for target in targets:
        parts: dict[tuple[int, ...], int] = {}
        for index, items in enumerate(by_name):
            source = items.get(target.fqn)
            if source is None or not _meet(target, source):
                continue
            if source.sizes == source.shape:  # whole: of several that may differ, every rank takes the lowest rank's
                parts = {source.offsets: index}
                break
            known = parts.get(source.offsets)
            if known is None or (snapshots[known].scatter is not None and snapshots[index].scatter is None):
                parts[source.offsets] = index
        chosen.update(parts.values())
    return [snapshots[index] for index in sorted(chosen)] or list(snapshots[:1])


def _meet(target: Item, source: Item) -> bool:
    return target.shape != source.shape or all(
        low < other + length and other < low + size
        for low, size, other, length in zip(target.offsets, target.sizes, source.offsets, source.sizes, strict=True)
    )


def _copy_image(snapshot: Snapshot, layout: Layout) -> None:
    """Verify and copy in one pass, in the order of the image."""
    if snapshot.scatter is not None and snapshot.manifest is not None and all(map(is_memory, layout.locals)):
        places = [(i.data, bytes_of(t)) for i, t in zip(snapshot.plan.items, layout.locals, strict=True) if i.nbytes]
        check_crc(snapshot.manifest, snapshot.plan.nbytes, snapshot.scatter(places))
        return
    image, sources = snapshot.image, views(snapshot.plan, snapshot.image)
    checksum = position = 0
    for item, source, destination in zip(snapshot.plan.items, sources, layout.locals, strict=True):
        checksum = crc64nvme(image[position : item.data], checksum)
        checksum = copy_checked(destination, source, checksum)
        position = item.data + item.nbytes
    checksum = crc64nvme(image[position:], checksum)
    if snapshot.manifest is not None:
        check_crc(snapshot.manifest, len(image), checksum)


def _reshard(layout: Layout, snapshots: Sequence[Snapshot]) -> None:
    sources: dict[str, list[tuple[Item, torch.Tensor]]] = {}
    differing = _differing_values(snapshots)
    for snapshot in snapshots:
        for item, view in zip(snapshot.plan.items, views(snapshot.plan, snapshot.image), strict=True):
            known = sources.setdefault(item.fqn, [])
            same = next((theirs for other, theirs in known if other.offsets == item.offsets), None)
            if same is None:
                known.append((item, view))
            elif same.shape != view.shape or not torch.equal(_raw(same), _raw(view)):
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
        covered = sum(_copy_overlap(item, destination, source, view) for source, view in parts)
        if covered != destination.numel():
            raise JobFailedError(f"{item.fqn}: the snapshots hold {covered} of the {destination.numel()} elements here")


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: NaN equals NaN."""
    return tensor.reshape(-1).view(torch.uint8)


def _differing_values(snapshots: Sequence[Snapshot]) -> list[str]:
    """Names of plain values that are not the same in all snapshots of one shape."""
    first = snapshots[0]
    _, paths = leaf_paths(first.plan.shape)
    others = [snapshot for snapshot in snapshots[1:] if snapshot.plan.shape == first.plan.shape]
    return [
        fqn(path) for index, path in enumerate(paths) if any(s.values[index] != first.values[index] for s in others)
    ]


def _copy_overlap(target: Item, destination: torch.Tensor, source: Item, view: torch.Tensor) -> int:
    """Copy what both have of a tensor; returns the number of elements."""
    for dimension in range(len(target.shape)):
        low = max(target.offsets[dimension], source.offsets[dimension])
        high = min(
            target.offsets[dimension] + target.sizes[dimension], source.offsets[dimension] + source.sizes[dimension]
        )
        if high <= low:
            return 0
        destination = destination.narrow(dimension, low - target.offsets[dimension], high - low)
        view = view.narrow(dimension, low - source.offsets[dimension], high - low)
    with torch.no_grad():
        destination.copy_(view)
    return destination.numel()


_Parts = dict[str, list[tuple[Item, torch.Tensor]]]


def _parts_of(snapshots: Sequence[Snapshot]) -> _Parts:
    """Every shard of every tensor, by name, verified."""
    parts: _Parts = {}
    for snapshot in snapshots:
        snapshot.check()  # it may be one of which nothing else was needed, or whose image was passed by until now
        for item, view in zip(snapshot.plan.items, views(snapshot.plan, snapshot.image), strict=True):
            parts.setdefault(item.fqn, []).append((item, view))
    return parts


def _private(parts: _Parts, name: str) -> torch.Tensor:
    """A tensor that nothing live stands for, such as the state of an optimizer before its first step."""
    found = parts.get(name, [])
    if not found:
        raise JobFailedError(f"{name}: no snapshot at hand holds any part of it")
    item = found[0][0]
    full = torch.empty(item.shape, dtype=getattr(torch, item.dtype))
    target = item._replace(offsets=(0,) * len(item.shape), sizes=item.shape)
    seen: set[tuple[int, ...]] = set()
    covered = 0
    for source, view in found:
        if source.offsets not in seen:
            seen.add(source.offsets)
            covered += _copy_overlap(target, full, source, view)
    if covered != full.numel():
        raise JobFailedError(
            f"{name} is sharded, and this rank has nothing to put its shard into",
            hint="Make one optimizer step (or build its state) before restoring, so that its state exists.",
        )
    return full
