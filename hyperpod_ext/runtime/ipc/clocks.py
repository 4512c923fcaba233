"""Translate times of other machines' monotonic clocks into times of this machine's monotonic clock. Pure functions."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

from hyperpod_ext.runtime.ipc.control_messages import Died, Event, Failed, Report

R = TypeVar("R", bound=Report)

_REMEMBERED = 32
"""Number of newest messages from which one clock is estimated. The number is large enough that at least one of the
messages has had almost no delay, and small enough that the clocks do not drift between the messages."""
_SAME_S = 0.5
"""Two clocks that differ by less than `_SAME_S` seconds are treated as the same clock, and their difference is treated
as message delay."""


class Clocks:
    """Estimates the difference between each other node's monotonic clock and this machine's. A monotonic clock starts
    at 0 when its machine starts."""

    def __init__(self) -> None:
        self._behind: dict[int, deque[float]] = {}

    def heard(self, node: int, there: float, here: float) -> None:
        """Record that a message with the node's clock time `there` arrived at this machine's time `here`. The delay of
        the message makes the node's clock appear further behind than it is."""
        self._behind.setdefault(node, deque(maxlen=_REMEMBERED)).append(here - there)

    def behind(self, node: int) -> float:
        """Return the number of seconds to add to times of the node's clock; 0 if the node has the same clock as this
        machine, or if the node's clock is unknown."""
        least = min(self._behind.get(node, ()), default=0.0)
        return least if abs(least) >= _SAME_S else 0.0

    def translated(self, node: int, report: R) -> R:
        """Return a copy of the node's report in which times are translated to this machine's clock."""
        behind = self.behind(node)
        if not behind or not isinstance(report, Event | Failed | Died):
            return report
        moved: dict[str, object] = {"t": report.t + behind}
        if isinstance(report, Event) and isinstance(began := report.fields.get("began"), int | float):
            moved["fields"] = {**report.fields, "began": began + behind}
        return report.model_copy(update=moved)
