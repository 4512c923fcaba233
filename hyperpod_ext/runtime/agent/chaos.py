"""Rehearsed faults, inflicted from outside the worker, as a real one would be."""

from __future__ import annotations

from collections.abc import Collection

from hyperpod_ext.config.chaos import KillFault


class KillOnce:
    """Says when a worker is to be killed: each fault once, in the first process to reach its step."""

    def __init__(self, faults: Collection[KillFault]) -> None:
        self._left = set(faults)

    def due(self, rank: int, step: int) -> bool:
        """Whether `rank`, which now makes `step`, is to die; a fault that is due is spent."""
        due = {fault for fault in self._left if fault.rank == rank and fault.step == step}
        self._left -= due
        return bool(due)
