"""Limits the rate of copies, so that they slow down training only a little.

The slowdown depends on the node's cores, memory and network, so it is measured: the duration of steps during a copy is
compared with the duration of other steps. If a lower rate does not reduce the slowdown, the rate is not limited.
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
"""Number of steps with a copy, and number of steps without a copy, that must be measured before the rate is changed. A
single slow step must not change the rate."""
_SENDING = 0.25
"""Minimum share of a step during which a copy must run for the step to count as a step with a copy. A step in which a
copy only begins is longer because of its snapshot, and not because of the copy."""
_LOOK_S = 0.1  # seconds between two checks whether a waiting copy was cancelled
_NO_BETTER = 1.5
"""A lower rate counts as worse if the training time lost per byte grows by more than this factor. The lost time per
byte can grow, because a slowed copy wakes up often."""
_REST = 16
"""Number of decisions to wait before another lower rate is tried, after a lower rate was worse. The number is doubled
each time a lower rate is worse."""
_LONGEST_REST = 1024


def next_rate(rate: float, achieved: float, slowdown: float, max_slowdown: float, floor: float) -> float:
    """Return the new maximum rate in bytes per second; infinite for no limit.

    `achieved` is the number of bytes that were sent per second. `slowdown` is how much longer steps took during copies,
    as a share of a step without a copy.
    """
    if slowdown > max_slowdown:
        share = min(0.9, max(0.5, max_slowdown / slowdown))
        return max(floor, share * min(rate, achieved))
    faster = rate * (1.5 if slowdown < max_slowdown / 2 else 1.1)
    # no limit if copies used less than half of the rate `faster`
    return max(floor, faster if faster < 2 * achieved else math.inf)


class RateLimit:
    """Limits the rate at which senders of copies send bytes. The rate limit is adapted to the measured durations of
    training steps. Thread-safe."""

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
        """Training seconds lost per byte before the rate was lowered; None if no lower rate is being tried."""
        self._resting, self._rest = 0, _REST
        self._free_at = 0.0
        self._copies = 0
        self._since, self._in_flight_s = 0.0, 0.0
        self._decided_at, self._sent = 0.0, 0  # copying seconds at the last decision, and bytes sent since the decision
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
        """Return the total number of seconds during which a copy was running."""
        with self._lock:
            return self._sending_s()

    def _sending_s(self) -> float:
        return self._in_flight_s + (self._now() - self._since if self._copies else 0.0)

    def finish_within(self, nbytes: int, seconds: float) -> None:
        """Keep the rate high enough to send `nbytes` within `seconds`, the time until the next copy is due."""
        with self._lock:
            self.floor = nbytes / seconds if seconds > 0 else math.inf
            self.rate = max(self.rate, self.floor)

    def unthrottle(self) -> None:
        """Remove the rate limit until the next copy is due, because the current copy matters more than training
        speed."""
        with self._lock:
            self.rate = self.floor = math.inf
            self._free_at = self._now()

    def observe_step(self, seconds: float, sending: float) -> None:
        """Record the duration of a step, and the share of the step during which a copy was running."""
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
        """Choose the next rate. `slowdown` is how much longer a step takes during a copy, as a share of a step without
        a copy. `lost` is the number of seconds that training loses per byte sent."""
        self._resting = max(0, self._resting - 1)
        if self._before is not None and lost > _NO_BETTER * self._before:
            self.rate, self._before = math.inf, None
            self._resting, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)
            return
        if self._before is not None and slowdown <= self._max_slowdown:
            self._rest = _REST  # the lower rate has reduced the slowdown enough
        before = self.rate
        if slowdown <= self._max_slowdown or not self._resting:
            self.rate = next_rate(before, achieved, slowdown, self._max_slowdown, self.floor)
        self._before = min(lost, self._before or lost) if self.rate < min(before, achieved) else None

    def _achieved(self) -> float:
        """Return the bytes sent per second since the last decision, counting only time in which copies were running."""
        return self._sent / (self._sending_s() - self._decided_at) if self._sent else 0.0

    def take(self, nbytes: int, stop: Callable[[], bool]) -> None:
        """Wait until `nbytes` may be sent or `stop()` returns true."""
        with self._lock:
            self._sent += nbytes
            start = max(self._now(), self._free_at)
            self._free_at = start + nbytes / self.rate
        while (left := start - self._now()) > 0 and not stop() and not math.isinf(self.rate):
            self._sleep(min(left, _LOOK_S))
