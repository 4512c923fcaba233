"""A thread that looks after a generation that is over, until its rank has left it."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable

from hyperpod_ext.runtime.process_group.gloo import cpu_contention

_LOOK_S, _SLOWER, _SLOWEST_LOOK_S = 0.005, 1.2, 0.05
"""How often it is looked, once a generation is over."""
_LOOK_SHARE = 0.1
"""Share of the time that may go into looking: where many ranks share few cores, it is taken from those not free yet."""


class Over:
    """A generation that is over.

    Args:
        look: called again and again, by the watcher's thread.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._left = threading.Event()
        self._looking = threading.Lock()
        self._rest_until = 0.0

    def rest(self, seconds: float) -> None:
        """The rank is about to leave, and will hardly need a look any more: none is due for so long, and a little."""
        self._rest_until = time.monotonic() + seconds + _LOOK_S

    def leave(self) -> None:
        """The rank leaves. No look is under way when this returns, and none comes later."""
        self._left.set()
        with self._looking:
            pass

    def watch(self) -> None:
        """Returns when the rank has left."""
        if self._left.wait(_LOOK_S):
            return
        # most ranks are woken in the ordinary way, if they get a core
        pause_s = cpu_contention.turn_s(cpu_contention.per_core())
        every_s = _LOOK_S
        while not self._left.wait(max(pause_s, self._rest_until - time.monotonic())):
            if time.monotonic() < self._rest_until:  # it began to leave meanwhile
                continue
            began = time.thread_time()
            with self._looking:
                if self._left.is_set():
                    return
                try:
                    self._look()
                except Exception:  # out of descriptors, say: that look is lost, and not those that come after it
                    traceback.print_exc()
            every_s = min(every_s * _SLOWER, _SLOWEST_LOOK_S)
            pause_s = min(max(every_s, (time.thread_time() - began) / _LOOK_SHARE), _SLOWEST_LOOK_S)


class AbortWatcher:
    """The thread. It is there before it is needed: to start it at a cut took a rank as long as the cut."""

    def __init__(self) -> None:
        self._overs: queue.SimpleQueue[Over | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="hpx-abort", daemon=True).start()

    def look_after(self, over: Over) -> None:
        """Watch it. What was given before must have been left."""
        self._overs.put(over)

    def end(self) -> None:
        """Nothing comes after this."""
        self._overs.put(None)

    def _work(self) -> None:
        while (over := self._overs.get()) is not None:
            over.watch()
