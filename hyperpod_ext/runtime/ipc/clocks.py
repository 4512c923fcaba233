"""What time it is here when another machine says what time it is there. Pure."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

from hyperpod_ext.runtime.ipc.control_messages import Died, Event, Failed, Report

R = TypeVar("R", bound=Report)

_REMEMBERED = 32
"""Messages by which a clock is judged: enough for one that was not delayed, too few for clocks to drift apart in."""
_SAME_S = 0.5
"""What differs less is the same clock, heard of a little late."""


class Clocks:
    """Translates moments of other nodes' monotonic clocks, each of which counts from its machine's own start."""

    def __init__(self) -> None:
        self._behind: dict[int, deque[float]] = {}

    def heard(self, node: int, there: float, here: float) -> None:
        """A node has said its time; what the message took on its way counts as if the clock were behind."""
        self._behind.setdefault(node, deque(maxlen=_REMEMBERED)).append(here - there)

    def behind(self, node: int) -> float:
        """Seconds to add to the node's moments; 0 where the clock is the same, or not known."""
        least = min(self._behind.get(node, ()), default=0.0)
        return least if abs(least) >= _SAME_S else 0.0

    def translated(self, node: int, report: R) -> R:
        """A report of the node, with its moments as they are here."""
        behind = self.behind(node)
        if not behind or not isinstance(report, Event | Failed | Died):
            return report
        moved: dict[str, object] = {"t": report.t + behind}
        if isinstance(report, Event) and isinstance(began := report.fields.get("began"), int | float):
            moved["fields"] = {**report.fields, "began": began + behind}
        return report.model_copy(update=moved)
