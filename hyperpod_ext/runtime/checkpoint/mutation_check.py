"""Whether tensors are still what they were when a copy of them began, as far as can be seen without reading them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hyperpod_ext.runtime.snapshot.fast_copy import is_memory

_LOOKED_AT = 32
"""Tensors of which a few elements are compared: autograd does not count what goes through `.data`."""
_ELEMENTS = 8


class TensorVersions(NamedTuple):
    """What the tensors were at one moment."""

    versions: list[int]
    elements: torch.Tensor
    """Of some of them, as bytes: NaN equals NaN."""


class MutationCheck:
    """Looks at the same tensors save after save; what it needs of each is found once."""

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor], *, readable: bool = True) -> None:
        """`readable`: their memory can be read at any time; no device is still working on it."""
        counted = [(n, tensor) for n, tensor in zip(names, tensors, strict=True) if not tensor.is_inference()]
        self._names, self._counted = [n for n, _ in counted], [tensor for _, tensor in counted]
        every = max(1, -(-len(tensors) // _LOOKED_AT))
        few = {names[i]: _few(tensors[i]) for i in range(0, len(tensors), every) if readable and is_memory(tensors[i])}
        self._few_names = [name for name, view in few.items() for _ in range(view.numel())]
        self._few = list(few.values())

    def look(self) -> TensorVersions:
        """What they are now."""
        return TensorVersions(self._versions(), self._elements())

    def changed(self, since: TensorVersions, *, elements: bool = False) -> str | None:
        """Name of a tensor that is not what it was; None: none.

        Autograd's version counters rise with in-place changes, but for those of fused optimizers and through `.data`;
        `elements`: have a look at some of those, too.
        """
        if (now := self._versions()) != since.versions:
            return next(name for name, a, b in zip(self._names, now, since.versions, strict=True) if a != b)
        if elements and not torch.equal(few := self._elements(), since.elements):
            return self._few_names[int(torch.nonzero(few != since.elements)[0])]
        return None

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in self._counted]

    def _elements(self) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat(self._few) if self._few else torch.empty(0, dtype=torch.uint8)


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a few elements, in the tensor's own memory."""
    return tensor.view(-1)[:_ELEMENTS].view(torch.uint8)
