"""Detect tensors that changed during their copy, by autograd's counters and by samples of the copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperpod_ext.runtime.snapshot.fast_copy import Unthrottle, copy_pieces_checked, is_memory, memory, pieces_of

_SAMPLE = 64
_EVERY = 1 << 20
"""Bytes between two samples of a tensor: few enough that a change of the whole tensor cannot miss them."""


class MutationCheck:
    """Reads autograd's version counters of the same tensors, save after save."""

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        counted = [(n, tensor) for n, tensor in zip(names, tensors, strict=True) if not tensor.is_inference()]
        self._names, self._counted = [n for n, _ in counted], [tensor for _, tensor in counted]

    def look(self) -> list[int]:
        """Return the counters. In-place changes raise them, except those of fused optimizers and through `.data`."""
        return [tensor._version for tensor in self._counted]

    def changed(self, since: list[int]) -> str | None:
        """Return the name of a tensor with an increased counter; None: none."""
        if (now := self.look()) == since:
            return None
        return next(name for name, a, b in zip(self._names, now, since, strict=True) if a != b)


class CopySamples:
    """Compares samples of tensors in this process's memory with their copies, without counters.

    A copy of temporary values differs from the tensor after its own values are back.

    Args:
        names, sources, destinations: the tensors' names, the tensors and their copies; kept alive for their addresses.
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
        """Return the name of a tensor that differs from its copy; None: all samples are equal."""
        live, copied = (copy_pieces_checked(each, 0, Unthrottle())[1] for each in (self._live, self._copied))
        if live == copied:
            return None
        pairs = ((name, memory(live, length), memory(copy, length)) for name, live, copy, length in self._samples)
        return next((name for name, live, copied in pairs if live != copied), None)
