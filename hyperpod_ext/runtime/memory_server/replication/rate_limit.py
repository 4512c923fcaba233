"""Limit the rate of copies so that training steps take little longer.

The cost of a copy depends on cores, memory and network of the node, so it is measured: steps during a copy are compared
with other steps. If a lower rate does not reduce the cost, the rate is not limited.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median

_IDLE_STEPS = 16
_ENOUGH = 6
"""Number of steps of a kind before a decision, so that one late step does not count."""
_SENDING = 0.25
"""Minimum share of a step with a copy. If a copy begins at its end, the snapshot made the step longer, not the copy."""
_LOOK_S = 0.1  # between two checks whether a waiting copy was cancelled
_NO_BETTER = 1.5
"""A lower rate is worse if it multiplies the time lost per byte by this: a waiting copy wakes up again and again."""
_REST = 16
"""Decisions before a lower rate is tried again after it was worse; doubled each time."""
_LONGEST_REST = 1024


def next_rate(rate: float, achieved: float, slowdown: float, max_slowdown: float, floor: float) -> float:
    """Return the new rate in bytes per second; infinite: no limit.

    `achieved`: bytes really sent per second. `slowdown`: how much longer steps took during copies, as a share.
    """
    if slowdown > max_slowdown:
        share = min(0.9, max(0.5, max_slowdown / slowdown))
        return max(floor, share * min(rate, achieved))
    faster = rate * (1.5 if slowdown < max_slowdown / 2 else 1.1)
    return max(floor, faster if faster < 2 * achieved else math.inf)  # the limit was not reached


class RateLimit:
    """Slows senders down, by a rate adapted to the steps. Thread-safe."""

    def __init__(
        self,
        max_slowdown: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._max_slowdown, self._now, self._sleep = max_slowdown, now, sleep
        self.rate, self.floor = math.inf, 0.0
        self._idle: deque[float] = deque(maxlen=_IDLE_STEPS)
        self._busy: list[float] = []
        self._before: float | None = None
        """Time lost per byte at the decision for a lower rate."""
        self._resting, self._rest = 0, _REST
        self._free_at = 0.0
        self._copies = 0
        self._since, self._in_flight_s = 0.0, 0.0
        self._decided_at, self._sent = 0.0, 0  # seconds in flight at the last decision, and bytes since
        self._lock = threading.Lock()

    def copy_begins(self) -> None:
        with self._lock:
            self._since = self._now() if not self._copies else self._since
            self._copies += 1

    def copy_ends(self) -> None:
        with self._lock:
            self._copies -= 1
            if not self._copies:
                self._in_flight_s += self._now() - self._since

    def sending_s(self) -> float:
        """Total seconds with a copy in flight."""
        with self._lock:
            return self._sending_s()

    def _sending_s(self) -> float:
        return self._in_flight_s + (self._now() - self._since if self._copies else 0.0)

    def finish_within(self, nbytes: int, seconds: float) -> None:
        """Keep the rate high enough to send `nbytes` in `seconds`, when the next copy is due."""
        with self._lock:
            self.floor = nbytes / seconds if seconds > 0 else math.inf
            self.rate = max(self.rate, self.floor)

    def unthrottle(self) -> None:
        """Lift the limit until the next copy is due: this copy matters more than training's lost time."""
        with self._lock:
            self.rate = self.floor = math.inf
            self._free_at = self._now()

    def observe_step(self, seconds: float, sending: float) -> None:
        """Record a step's duration, and the seconds of it with a copy in flight."""
        with self._lock:
            if not sending:
                self._idle.append(seconds)
            if sending < _SENDING:
                return
            self._busy.append(seconds)
            achieved = self._achieved()
            if len(self._busy) < _ENOUGH or len(self._idle) < _ENOUGH or not achieved:
                return
            idle = median(self._idle)
            longer = median(self._busy) - idle
            self._decide(longer / idle, achieved, longer * len(self._busy) / self._sent)
            self._busy.clear()
            self._decided_at, self._sent = self._sending_s(), 0

    def _decide(self, slowdown: float, achieved: float, lost: float) -> None:
        """Decide the next rate. `slowdown`: of a step, as a share; `lost`: seconds of training per byte."""
        self._resting = max(0, self._resting - 1)
        if self._before is not None and lost > _NO_BETTER * self._before:
            self.rate, self._before = math.inf, None
            self._resting, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)
            return
        if self._before is not None and slowdown <= self._max_slowdown:
            self._rest = _REST  # a lower rate did help
        before = self.rate
        if slowdown <= self._max_slowdown or not self._resting:
            self.rate = next_rate(before, achieved, slowdown, self._max_slowdown, self.floor)
        self._before = min(lost, self._before or lost) if self.rate < min(before, achieved) else None

    def _achieved(self) -> float:
        """Return the bytes per second since the last decision, while copies were in flight."""
        return self._sent / (self._sending_s() - self._decided_at) if self._sent else 0.0

    def take(self, nbytes: int, stop: Callable[[], bool]) -> None:
        """Wait until so many bytes may be sent, or `stop()` is true."""
        with self._lock:
            self._sent += nbytes
            start = max(self._now(), self._free_at)
            self._free_at = start + nbytes / self.rate
        while (left := start - self._now()) > 0 and not stop() and not math.isinf(self.rate):
            self._sleep(min(left, _LOOK_S))
