"""One rank's state as one run of bytes: where each tensor lies, and views to copy it in and out.

Offsets are 64-byte aligned, so that copies run at memory speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hyperpod_ext.errors import CorruptSnapshotError

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Item:
    """Place of one tensor."""

    dtype: str
    """Name in the torch module: `float32`."""
    shape: tuple[int, ...]
    offset: int
    """Byte offset in the image."""
    nbytes: int

    def to_json(self) -> list[Any]:
        return [self.dtype, list(self.shape), self.offset, self.nbytes]


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of all tensors of a state, in order."""

    items: tuple[Item, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Layout:
        """Layout for tensors of these types and shapes."""
        items, end = [], 0
        for tensor in tensors:
            offset = -(-end // _ALIGNMENT) * _ALIGNMENT
            nbytes = tensor.numel() * tensor.element_size()
            items.append(Item(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset, nbytes))
            end = offset + nbytes
        return cls(tuple(items), max(end, 1))

    def to_json(self) -> list[list[Any]]:
        return [item.to_json() for item in self.items]

    @classmethod
    def from_json(cls, items: Sequence[Sequence[Any]], nbytes: int) -> Layout:
        """Layout written by `to_json`; every item is checked to lie inside `nbytes`."""
        read = tuple(Item(str(i[0]), tuple(int(n) for n in i[1]), int(i[2]), int(i[3])) for i in items)
        for item in read:
            dtype = getattr(torch, item.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise CorruptSnapshotError(f"a snapshot's item has the unknown type {item.dtype!r}")
            if item.nbytes != torch.Size(item.shape).numel() * dtype.itemsize or not (
                0 <= item.offset <= item.offset + item.nbytes <= nbytes
            ):
                raise CorruptSnapshotError(f"a snapshot's item does not fit its image: {item}")
        return cls(read, nbytes)

    def views(self, buffer: Any, start: int = 0) -> list[torch.Tensor]:
        """A tensor for each item over `buffer`, from byte `start` on. They share its memory."""
        whole = torch.frombuffer(buffer, dtype=torch.uint8, count=self.nbytes, offset=start)
        return [self._view(whole, item) for item in self.items]

    @staticmethod
    def _view(whole: torch.Tensor, item: Item) -> torch.Tensor:
        dtype = getattr(torch, item.dtype)
        if item.nbytes == 0:
            return torch.empty(item.shape, dtype=dtype)
        return whole[item.offset : item.offset + item.nbytes].view(dtype).view(item.shape)


def copy_all(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    """Copy tensor by tensor. `Tensor.copy_` frees the GIL while it runs; storage copies do not."""
    with torch.no_grad():
        for source, destination in zip(sources, destinations, strict=True):
            destination.copy_(source)
