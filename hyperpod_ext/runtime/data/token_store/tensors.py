"""Samples as torch tensors that share the mapping's memory, without a copy or a warning about read-only arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class TensorSource:
    """`source[i]` of a store or `Packed` as a tensor of shape [n], of the stored type.

    The mapping is private: only this process sees writes to a tensor, but also in later epochs. Make a copy (`.long()`
    does) before writing. Micro-batches of `Packed` are read at once, and are such copies already.
    """

    def __init__(self, source: Any) -> None:
        self.source = source

    @property
    def fingerprint(self) -> str:
        """The source's fingerprint."""
        return str(self.source.fingerprint)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.from_numpy(self.source.get(number, writable=True))

    def __getitems__(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Return several samples at once, for DataLoader and ElasticDataLoader."""
        batch = getattr(self.source, "batch", None)
        if batch is None:
            return [self[number] for number in numbers]
        return list(torch.from_numpy(batch(numbers, dtype=None)))
