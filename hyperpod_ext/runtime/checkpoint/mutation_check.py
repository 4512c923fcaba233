"""Detect tensors that change while they are copied, by autograd's version counters and by samples of the copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperpod_ext.runtime.snapshot.fast_copy import Unthrottle, copy_pieces_checked, is_memory, memory, pieces_of

_SAMPLE = 64
"""Length of a sample in bytes."""
_EVERY = 1 << 20
"""Bytes from one sample of a tensor to the next. A change of all of a tensor's values always changes a sample."""


class MutationCheck:
    """Compares the version counters of tensors before and after a copy, at each save.

    Args:
        names: the tensors' names.
        tensors: the tensors. Inference tensors have no version counter, and are left out.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        counted = [(n, tensor) for n, tensor in zip(names, tensors, strict=True) if not tensor.is_inference()]
        self._names, self._counted = [n for n, _ in counted], [tensor for _, tensor in counted]

    def look(self) -> list[int]:
        """Return the tensors' version counters.

        An in-place change increases the counter, unless the change is made by a fused optimizer or through `.data`.
        """
        return [tensor._version for tensor in self._counted]

    def changed(self, since: list[int]) -> str | None:
        """Return the name of a tensor whose counter differs from `since` (from `look`); None if no counter differs."""
        if (now := self.look()) == since:
            return None
        return next(name for name, a, b in zip(self._names, now, since, strict=True) if a != b)


class CopySamples:
    """Compares samples of CPU tensors with their copies, to detect changes that increase no version counter.

    If a script replaced a tensor's values during the copy and restored them later, the samples of the tensor and of
    its copy differ, too: the copy contains the temporary values.

    Args:
        names: the tensors' names.
        sources: the tensors, which this object keeps alive, because it stores their addresses.
        destinations: the copies of the tensors, which this object keeps alive, too.
    """

    def __init__(
        self, names: Sequence[str], sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]
    ) -> None:
        self._kept = sources, destinations
        self._samples: list[tuple[str, int, int, int]] = []
        for name, source, destination in zip(names, sources, destinations, strict=True):
            nbytes = source.numel() * source.element_size()
            if nbytes and is_memory(source):
                length, live, copy = min(nbytes, _SAMPLE), source.data_ptr(), destination.data_ptr()
                starts = [*range(0, nbytes - length, _EVERY), nbytes - length]
                self._samples += [(name, live + start, copy + start, length) for start in starts]
        self._live = pieces_of([(0, live, length) for _, live, _, length in self._samples])
        self._copied = pieces_of([(0, copy, length) for _, _, copy, length in self._samples])

    def differing(self) -> str | None:
        """Return the name of a tensor of which a sample differs from its copy; None if all samples are equal."""
        live, copied = (copy_pieces_checked(each, 0, Unthrottle())[1] for each in (self._live, self._copied))
        if live == copied:
            return None
        pairs = ((name, memory(live, length), memory(copy, length)) for name, live, copy, length in self._samples)
        return next((name for name, live, copied in pairs if live != copied), None)
