"""The plan of one rank's snapshots: the offset of each shard in the snapshot's bytes.

A plan changes only if tensors are added to the model or the optimizer's state, or change their shapes. Therefore a
worker sends the plan to the memory server only once, and later saves refer to the plan by its digest. This file does
not import torch, because the memory server does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from hyperpod_ext.errors import CorruptSnapshotError
from hyperpod_ext.runtime.snapshot.tree import Form, Shape

DTYPE_BYTES = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes per element of each tensor type, by the type's name without `torch.`."""


class Item(NamedTuple):
    """One shard of one tensor in a snapshot."""

    tensor: int
    """Index of the tensor among all tensors of the state, in the order of `tree.take_apart`."""
    fqn: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor, over all ranks."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    """Offset and size of the shard in the whole tensor, by dimension."""
    start: int
    data: int
    """Byte offsets in the snapshot. `start` is the offset of the shard's zip archive; `data` is the offset of the
    shard's values inside the archive."""
    nbytes: int
    """Number of bytes of the shard's values."""
    end: int
    """Byte offset in the snapshot at which the shard's zip archive ends."""
    strides: tuple[int, ...] | None = None
    """Strides of the live tensor; None if it is contiguous or a shard. Values in the snapshot itself are always
    contiguous."""
    built: Form | None = None
    """Type, shape and strides that a new process builds, if training has changed them; None: unchanged."""

    @property
    def place(self) -> tuple[Any, ...]:
        """All fields except `strides` and `built`: the shard's position in the snapshot and in the whole tensor."""
        return self[:10]

    @property
    def form(self) -> Form:
        """Type, shape and strides of the whole tensor."""
        return Form(self.dtype, self.shape, self.strides)


@dataclass(frozen=True)
class Plan:
    """Layout of one rank's snapshots."""

    shape: Shape
    """The nested structure of the state, in the form of `tree.Shape`."""
    items: tuple[Item, ...]
    nbytes: int
    """Length of the snapshot in bytes."""

    def to_json(self) -> dict[str, Any]:
        items = [
            item if item.strides or item.built else item.place for item in self.items
        ]  # drop unset `strides` and `built`, unknown to earlier versions
        return {"shape": self.shape, "items": items, "nbytes": self.nbytes}

    @cached_property
    def text(self) -> str:
        """Canonical JSON."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, which manifests use as the plan's name."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def read_plan(document: Mapping[str, Any], digest: str) -> Plan:
    """Return the plan in `document`, after its digest and its consistency are checked.

    Raises:
        CorruptSnapshotError: the plan's digest is not `digest`, or the plan is inconsistent.
    """
    try:
        items = tuple(map(_item, document["items"]))
        plan = Plan(read_shape(document["shape"]), items, int(document["nbytes"]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptSnapshotError(f"a snapshot's plan cannot be read: {error!r}") from error
    if plan.digest != digest:
        raise CorruptSnapshotError(f"a snapshot's plan does not have the digest in its manifest ({digest[:12]}…)")
    for item in items:
        _check(item, plan.nbytes)
    return plan


def _item(i: Sequence[Any]) -> Item:
    start, data, nbytes, end = _ints(i[6:10])
    more = (_strides(i[10]), _form(i[11])) if len(i) > 10 else (None, None)
    return Item(int(i[0]), str(i[1]), str(i[2]), _ints(i[3]), _ints(i[4]), _ints(i[5]), start, data, nbytes, end, *more)


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _strides(values: Any) -> tuple[int, ...] | None:
    return None if values is None else _ints(values)


def _form(values: Any) -> Form | None:
    return None if values is None else Form(str(values[0]), _ints(values[1]), _strides(values[2]))


def read_shape(shape: list[Any]) -> Shape:
    """Return a state's structure that was read from JSON in the form of `tree.Shape`: JSON turns tuples into lists."""
    return [tuple(node) if isinstance(node, list) else node for node in shape]


def _check(item: Item, nbytes: int) -> None:
    """Raise CorruptSnapshotError if an item's offsets are inconsistent.

    Even a wrong plan with a valid signature must not cause reads outside of the snapshot's bytes.
    """
    elements = 1
    for size in item.sizes:
        elements *= size
    in_bounds = 0 <= item.start <= item.data and item.data + item.nbytes <= item.end <= nbytes
    inside = len(item.shape) == len(item.offsets) == len(item.sizes) and all(
        offset >= 0 and size >= 0 and offset + size <= full
        for full, offset, size in zip(item.shape, item.offsets, item.sizes, strict=True)
    )
    if item.strides is not None and (len(item.strides) != len(item.sizes) or item.sizes != item.shape):
        raise CorruptSnapshotError(f"{item.fqn}: strides {item.strides} do not fit shape {item.shape}")
    if item.dtype not in DTYPE_BYTES:
        raise CorruptSnapshotError(
            f"{item.fqn}: its type {item.dtype!r} cannot be read by this version",
            hint="Upgrade hyperpod_ext in the container.",
        )
    if not in_bounds or not inside or item.nbytes != elements * DTYPE_BYTES[item.dtype]:
        raise CorruptSnapshotError(f"{item.fqn}: its offsets or sizes in the snapshot are wrong: {item}")
