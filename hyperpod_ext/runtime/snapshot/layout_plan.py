"""Layout of one rank's snapshots: the place of each tensor's part in the image. Does not import torch.

A plan changes only with the model or the optimizer's state, so it is made once, named by its digest, and sent once; a
save then only sends the digest.
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
"""Element sizes in bytes, by torch's names without the `torch.`."""


class Item(NamedTuple):
    """One shard of one tensor in the image."""

    tensor: int
    """Index of the tensor in the state, in the order of the walk."""
    fqn: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor, over all ranks."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    """The shard's place in the whole tensor."""
    start: int
    data: int
    """Byte offsets in the image: of the shard's archive, and of the raw bytes in the archive."""
    nbytes: int
    """Length of the raw bytes."""
    end: int
    """Byte offset behind the archive."""
    strides: tuple[int, ...] | None = None
    """Strides of the live tensor; None if contiguous, or for a shard. The image is always contiguous."""
    built: Form | None = None
    """Form of the newly built tensor, if training has changed it since."""

    @property
    def place(self) -> tuple[Any, ...]:
        """All fields on the place of the bytes in the image and in the tensor."""
        return self[:10]

    @property
    def form(self) -> Form:
        """Type, shape and strides of the whole tensor."""
        return Form(self.dtype, self.shape, self.strides)


@dataclass(frozen=True)
class Plan:
    """Layout of one rank's snapshots."""

    shape: Shape
    items: tuple[Item, ...]
    nbytes: int
    """Length of the image."""

    def to_json(self) -> dict[str, Any]:
        items = [
            item if item.strides or item.built else item.place for item in self.items
        ]  # the form of earlier versions
        return {"shape": self.shape, "items": items, "nbytes": self.nbytes}

    @cached_property
    def text(self) -> str:
        """Canonical JSON."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON: the plan's name."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def read_plan(document: Mapping[str, Any], digest: str) -> Plan:
    """Return a received plan, checked against its digest and for consistency.

    Raises:
        CorruptSnapshotError: the digest differs, or the plan is inconsistent.
    """
    try:
        items = tuple(map(_item, document["items"]))
        plan = Plan(read_shape(document["shape"]), items, int(document["nbytes"]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptSnapshotError(f"a snapshot's plan cannot be read: {error!r}") from error
    if plan.digest != digest:
        raise CorruptSnapshotError(f"a snapshot's plan is not the one its manifest names ({digest[:12]}…)")
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
    """Return the shape in the form of `take_apart`, with tuples, which JSON lacks."""
    return [tuple(node) if isinstance(node, list) else node for node in shape]


def _check(item: Item, nbytes: int) -> None:
    """Check an item's place: even a signed but wrong plan must not cause reads outside of the image."""
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
        raise CorruptSnapshotError(f"{item.fqn}: its type {item.dtype!r} is not known here")
    if not in_bounds or not inside or item.nbytes != elements * DTYPE_BYTES[item.dtype]:
        raise CorruptSnapshotError(f"{item.fqn}: its place in the image makes no sense: {item}")
