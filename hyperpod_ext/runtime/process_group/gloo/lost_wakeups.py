"""Finds and ends waits that would never end, because gloo has lost the wake-up after a connection ended.

An event thread is a thread of gloo that waits in epoll for events on a group's sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from hyperpod_ext.runtime.process_group.gloo.sockets import EventLoop, answer_for
from hyperpod_ext.runtime.process_group.gloo.waits import LostWakeups, StuckWait, ran_s

_CIRCLES_S = 0.005
"""CPU time, in seconds, after which a busy event thread has surely processed all ended connections."""
_SURELY_S = 0.5
"""Seconds after which waits are ended even if a running thread may be an event thread of gloo."""
_WHY = "Connection closed by peer: this generation of the job is over"


class LostWakeupMonitor:
    """Checks waits repeatedly. Ends waits that were asleep in two checks after all event threads have done their work.

    An event thread that has processed all ended connections sleeps again, or spins; a spinning thread counts as done
    when it has used some CPU time. An event thread that has not had a core yet will still wake some waits. Waits that
    an event thread will wake must not be touched.

    Args:
        waits: object that finds and ends waits in this process.
        loops: function that returns the event loops (epoll set and sockets) of this process's groups.
        places: number of ranks in the largest group.
    """

    def __init__(self, waits: LostWakeups, loops: Callable[[], Sequence[EventLoop]], places: int) -> None:
        self._waits, self._loops, self._places = waits, loops, places
        self._began = time.monotonic()
        self._before: list[StuckWait] = []
        self._answered: set[tuple[str, int]] = set()
        self._ran: dict[int, float] = {}

    def look(self, busy: Collection[int]) -> None:
        """Check all waits once.

        `busy`: epoll sets whose event threads have processed ended connections only just now, or not yet."""
        seen = self._waits.look()
        quiet = seen.polled.issuperset(busy) or self._in_circles(seen.running)
        before, self._before = self._before, seen.asleep if quiet else []
        again = [lost for lost in self._before if lost in before]
        answered = self._answer() if any(lost.in_pair for lost in again) else False
        for lost in again:
            if lost.buffer and not (lost.in_pair and answered):
                self._waits.end(lost, _WHY)

    def _in_circles(self, running: Sequence[int]) -> bool:
        self._ran = {thread: self._ran.get(thread, ran_s(thread)) for thread in running}
        if time.monotonic() - self._began > _SURELY_S:
            return True
        return bool(running) and all(ran_s(thread) - since >= _CIRCLES_S for thread, since in self._ran.items())

    def _answer(self) -> bool:
        """Connect to each new group, in place of members that will never connect. Returns False if there is no new
        group."""
        new = [loop for loop in self._loops() if loop.address not in self._answered]
        for loop in new:
            self._answered.add(loop.address)
            answer_for(loop, self._places)
        return bool(new)
