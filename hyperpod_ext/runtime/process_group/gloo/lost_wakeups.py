"""Which waits gloo has forgotten, once its connections have ended: those that nobody is left to wake."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from hyperpod_ext.runtime.process_group.gloo.sockets import EventLoop, answer_for
from hyperpod_ext.runtime.process_group.gloo.waits import LostWakeups, StuckWait, ran_s

_CIRCLES_S = 0.005
"""An event thread that has run so long since its connections ended has been through all of them."""
_SURELY_S = 0.5
"""After so long, waits are ended though a thread still runs that may be one of gloo's."""
_WHY = "Connection closed by peer: this generation of the job is over"


class LostWakeupMonitor:
    """Looks again and again, and ends what is asleep at two looks when all event threads have done what they had to.

    An event thread that has noticed all ends of connections sleeps again. One that has not yet had a core is not
    waited for in vain: what it will wake itself may not be touched. One that turns in circles has run for a while.

    Args:
        waits: this process's.
        loops: finds the event threads of its groups.
        places: ranks of the largest group.
    """

    def __init__(self, waits: LostWakeups, loops: Callable[[], Sequence[EventLoop]], places: int) -> None:
        self._waits, self._loops, self._places = waits, loops, places
        self._began = time.monotonic()
        self._before: list[StuckWait] = []
        self._answered: set[tuple[str, int]] = set()
        self._ran: dict[int, float] = {}

    def look(self, busy: Collection[int]) -> None:
        """`busy`: epoll sets of the event threads that have ends of connections to notice, or had a moment ago."""
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
        """Answer for those who will not connect any more; False: that was done before."""
        new = [loop for loop in self._loops() if loop.address not in self._answered]
        for loop in new:
            self._answered.add(loop.address)
            answer_for(loop, self._places)
        return bool(new)
