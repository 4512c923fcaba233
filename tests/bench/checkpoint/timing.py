"""Clocks: wall time, and `adj`, wall less the time this thread stood in the run queue of a busy machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def queue_wait() -> float:
    """Seconds the calling thread was ready to run and did not."""
    return int(_SCHEDSTAT.read_text().split()[1]) / 1e9


class Stopwatch:
    """Seconds of its block, as `wall` and `adj`."""

    wall = adj = 0.0

    def __enter__(self) -> Stopwatch:
        self._wait, self.start = queue_wait(), time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall = time.monotonic() - self.start
        self.adj = self.wall - (queue_wait() - self._wait)

    def to_json(self) -> dict[str, float]:
        return {"wall": self.wall, "adj": self.adj}


class Floor:
    """Per-tensor copy_ into memory that has been touched: what no copy can beat."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._copies = [torch.zeros_like(tensor).fill_(1) for tensor in tensors]

    def measure(self) -> dict[str, Any]:
        with Stopwatch() as clock:
            self.copy()
        return clock.to_json()

    @torch.no_grad()
    def copy(self) -> None:
        for copy, tensor in zip(self._copies, self._tensors, strict=True):
            copy.copy_(tensor)

    @torch.no_grad()
    def copy_back(self) -> None:
        for copy, tensor in zip(self._copies, self._tensors, strict=True):
            tensor.copy_(copy)
