"""Samples of a token store as torch tensors, without torch's warnings about read-only arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class TensorSource:
    """Wraps a token store or `Packed`, so that `source[i]` is a tensor of shape [n] and of the stored type.

    Only this process sees writes to a tensor, but it also sees them when it reads the same sample in a later epoch.
    Before writing to a tensor, copy the tensor, for example with `.long()`. Micro-batches of `Packed` are already
    copies.
    """

    def __init__(self, source: Any) -> None:
        self.source = source

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the wrapped store or `Packed`."""
        return str(self.source.fingerprint)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.from_numpy(self.source.get(number, writable=True))

    def __getitems__(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Return several samples, which are read together. torch's DataLoader and ElasticDataLoader call this
        method."""
        batch = getattr(self.source, "batch", None)
        if batch is None:
            return [self[number] for number in numbers]
        return list(torch.from_numpy(batch(numbers, dtype=None)))
