"""Clocks: wall time, and `adj`, wall less the time this thread stood in the run queue of a busy machine."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def queue_wait() -> float:
    """Seconds the calling thread was ready to run and did not."""
    return int(_SCHEDSTAT.read_text().split()[1]) / 1e9


def page_faults() -> int:
    """Of the calling thread so far: pages that the kernel has made or mapped for it."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_minflt + usage.ru_majflt


class Stopwatch:
    """Seconds of its block, as `wall` and `adj`, and the calling thread's page faults in it."""

    wall = adj = 0.0
    faults = 0

    def __enter__(self) -> Stopwatch:
        self._faults, self._wait, self.start = page_faults(), queue_wait(), time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall = time.monotonic() - self.start
        self.adj = self.wall - (queue_wait() - self._wait)
        self.faults = page_faults() - self._faults

    def to_json(self) -> dict[str, float]:
        return {"wall": self.wall, "adj": self.adj, "faults": self.faults}


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
