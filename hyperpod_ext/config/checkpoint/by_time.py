"""Which tiers with `every_seconds` are due. Whoever keeps the time names the step; the others follow."""

from __future__ import annotations

from collections.abc import Iterable


class DueByTime:
    """The time of each tier's last step.

    Args:
        now: seconds, of a clock that only runs forward; the first step is due one interval later.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._named_at: dict[str, float] = {}

    def due(self, kind: str, every: float, now: float) -> bool:
        """Return whether a tier of this kind, which gets a step `every` so many seconds, gets one now."""
        return now - self._named_at.get(kind, self._began) >= every

    def name(self, kinds: Iterable[str], now: float) -> None:
        """Record that these tiers get a step, for which their next interval begins."""
        self._named_at |= dict.fromkeys(kinds, now)
