"""Samples as torch tensors that share the mapping's memory: no copy, and no warning about read-only arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class TensorSource:
    """`source[i]` of a store or `Packed` as a tensor of shape [n], of the stored type.

    The mapping is private: a tensor may be written to, and this process alone will see it, for as long as it runs. Make
    a copy (`.long()` does) where the next epoch should see what is stored. The samples of a micro-batch are read at
    once where they are packed, and are such copies already.
    """

    def __init__(self, source: Any) -> None:
        self.source = source

    @property
    def fingerprint(self) -> str:
        """The source's."""
        return str(self.source.fingerprint)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.from_numpy(self.source.get(number, writable=True))

    def __getitems__(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """What a DataLoader and ElasticDataLoader ask for."""
        batch = getattr(self.source, "batch", None)
        if batch is None:
            return [self[number] for number in numbers]
        return list(torch.from_numpy(batch(numbers, dtype=None)))
