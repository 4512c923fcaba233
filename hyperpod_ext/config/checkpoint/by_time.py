"""Timer of checkpoint tiers with `every_seconds`. One process of the job runs the timer and chooses the steps to save;
all other processes save the steps that this process chose."""

from __future__ import annotations

from collections.abc import Iterable


class DueByTime:
    """Decides when the next step is saved to each tier with `every_seconds`.

    Args:
        now: present time in seconds, of a clock that only runs forward. The first save is due one interval after `now`.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._named_at: dict[str, float] = {}

    def due(self, kind: str, every: float, now: float) -> bool:
        """Return whether the tier `kind` needs a save: its last step was chosen at least `every` seconds ago."""
        return now - self._named_at.get(kind, self._began) >= every

    def name(self, kinds: Iterable[str], now: float) -> None:
        """Record that a step was chosen for the tiers `kinds` at time `now`, when the next interval of these tiers
        begins."""
        self._named_at |= dict.fromkeys(kinds, now)
