"""Samples as torch tensors that share the mapping's memory: no copy, and no warning about read-only arrays."""

from __future__ import annotations

from typing import Any

import torch


class TensorSource:
    """`source[i]` of a `TokenStore`, `MegatronStore` or `Packed` as a tensor of shape [n], of the stored type.

    The mapping is private: a tensor may be written to, and this process alone will see it, for as long as it runs. Make
    a copy (`.long()` does) where the next epoch should see what is stored.
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
