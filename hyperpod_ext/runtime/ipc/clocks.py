"""Translate times of other machines' monotonic clocks to this machine's clock. Pure functions."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

from hyperpod_ext.runtime.ipc.control_messages import Died, Event, Failed, Report

R = TypeVar("R", bound=Report)

_REMEMBERED = 32
"""Number of messages for one estimate. Enough that one of them has no delay, and few enough that the clocks do not
drift."""
_SAME_S = 0.5
"""Seconds below which a difference counts as message delay between processes with the same clock."""


class Clocks:
    """Estimates of other nodes' monotonic clocks. A monotonic clock starts at 0 with its machine."""

    def __init__(self) -> None:
        self._behind: dict[int, deque[float]] = {}

    def heard(self, node: int, there: float, here: float) -> None:
        """Record the time that a node reports in a message. The message's delay makes the node's clock appear to be
        behind."""
        self._behind.setdefault(node, deque(maxlen=_REMEMBERED)).append(here - there)

    def behind(self, node: int) -> float:
        """Return the seconds to add to the node's times; 0 if its clock is this machine's or is unknown."""
        least = min(self._behind.get(node, ()), default=0.0)
        return least if abs(least) >= _SAME_S else 0.0

    def translated(self, node: int, report: R) -> R:
        """Return the node's report with its times translated to this machine's clock."""
        behind = self.behind(node)
        if not behind or not isinstance(report, Event | Failed | Died):
            return report
        moved: dict[str, object] = {"t": report.t + behind}
        if isinstance(report, Event) and isinstance(began := report.fields.get("began"), int | float):
            moved["fields"] = {**report.fields, "began": began + behind}
        return report.model_copy(update=moved)
