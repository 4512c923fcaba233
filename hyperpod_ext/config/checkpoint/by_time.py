"""Clock of tiers with `every_seconds`. One process runs the clock and chooses the steps; other processes follow."""

from __future__ import annotations

from collections.abc import Iterable


class DueByTime:
    """Decides when each tier gets its next step.

    Args:
        now: seconds, of a clock that only runs forward; the first step is due one interval later.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._named_at: dict[str, float] = {}

    def due(self, kind: str, every: float, now: float) -> bool:
        """Return whether a tier of this kind is due, `every` seconds after its last step was named."""
        return now - self._named_at.get(kind, self._began) >= every

    def name(self, kinds: Iterable[str], now: float) -> None:
        """Record that a step is named for these tiers: their next interval begins."""
        self._named_at |= dict.fromkeys(kinds, now)
