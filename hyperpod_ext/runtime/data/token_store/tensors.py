"""Samples as torch tensors that share the mapping's memory, without a copy, and without warnings about read-only
arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class TensorSource:
    """Wraps a store or `Packed`: `source[i]` is a tensor of shape [n] and of the stored type.

    The mapping is private: only this process sees writes to a tensor, but it also sees them in later epochs. Before
    writing to a tensor, copy it, for example with `.long()`. Micro-batches of `Packed` are read at once, and are copies
    already.
    """

    def __init__(self, source: Any) -> None:
        self.source = source

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the source."""
        return str(self.source.fingerprint)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.from_numpy(self.source.get(number, writable=True))

    def __getitems__(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Return several samples, read at once. torch's DataLoader and ElasticDataLoader call this method if it
        exists."""
        batch = getattr(self.source, "batch", None)
        if batch is None:
            return [self[number] for number in numbers]
        return list(torch.from_numpy(batch(numbers, dtype=None)))
