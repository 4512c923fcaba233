"""The coordinator's part in finding who hangs: when one agent sees no progress, all say what they see."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hyperpod_ext.runtime.detection.hangs import Hang, Sign, find_hung

_AGAIN_S = 0.5
"""Agents tell of a stall again and again; they are not asked more often than this."""


class Inquest:
    """Gathers the signs of all ranks, and judges once they are together."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._signs: dict[int, Sign] = {}
        self._limit_s, self._asked_at = 0.0, 0.0

    def stalled(self, message: Mapping[str, Any]) -> bool:
        """An agent sees no progress. Returns whether all are to be asked now."""
        now = time.monotonic()
        if now - self._asked_at < _AGAIN_S:
            return False
        self._asked_at, self._limit_s, self._signs = now, float(message["limit_s"]), {}
        return True

    def heard(self, message: Mapping[str, Any]) -> Hang | None:
        """One agent's answer. Returns who hangs, once the last one has come."""
        for fields in message["signs"]:
            sign = Sign.from_json(fields)
            self._signs[sign.rank] = sign
        if len(self._signs) < self._world_size:
            return None
        signs, self._signs = self._signs, {}
        return find_hung(signs, self._world_size, self._limit_s)
