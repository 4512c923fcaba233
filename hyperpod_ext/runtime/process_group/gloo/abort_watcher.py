"""A thread that looks for lost wake-ups in gloo after an abort, until this rank has left the generation.

A wake-up is lost if gloo does not wake an operation although the operation's connection has ended (see `waits.py`)."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable

from hyperpod_ext.runtime.process_group.gloo import cpu_contention

_LOOK_S, _SLOWER, _SLOWEST_LOOK_S = 0.005, 1.2, 0.05
"""Seconds between the first checks after an abort, growth factor of the pauses between checks, and longest pause in
seconds."""
_LOOK_SHARE = 0.1
"""Maximum share of time for checks, which delay other ranks if many ranks share few cores."""


class Over:
    """An aborted generation that this rank has not left yet.

    Args:
        look: function that checks once for lost wake-ups. The watcher's thread calls this function repeatedly.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._left = threading.Event()
        self._looking = threading.Lock()
        self._rest_until = 0.0

    def rest(self, seconds: float) -> None:
        """Pause the checks for a little more than `seconds`, because this rank is about to leave the generation."""
        self._rest_until = time.monotonic() + seconds + _LOOK_S

    def leave(self) -> None:
        """Stop the checks. Waits for the end of a running check."""
        self._left.set()
        with self._looking:
            pass

    def watch(self) -> None:
        """Check for lost wake-ups repeatedly, until this rank has left the generation."""
        if self._left.wait(_LOOK_S):
            return
        # delay the first check: gloo itself wakes most ranks as soon as they get a core
        pause_s = cpu_contention.turn_s(cpu_contention.per_core())
        every_s = _LOOK_S
        while not self._left.wait(max(pause_s, self._rest_until - time.monotonic())):
            if time.monotonic() < self._rest_until:  # this rank has begun to leave the generation
                continue
            began = time.thread_time()
            with self._looking:
                if self._left.is_set():
                    return
                try:
                    self._look()
                except Exception:  # for example, no file descriptor is free; the next check tries again
                    traceback.print_exc()
            every_s = min(every_s * _SLOWER, _SLOWEST_LOOK_S)
            pause_s = min(max(every_s, (time.thread_time() - began) / _LOOK_SHARE), _SLOWEST_LOOK_S)


class AbortWatcher:
    """The watching thread, started in advance because a start during an abort took as long as the abort itself."""

    def __init__(self) -> None:
        self._overs: queue.SimpleQueue[Over | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="hpx-abort", daemon=True).start()

    def look_after(self, over: Over) -> None:
        """Start to watch an aborted generation. This rank must have left the generation that was watched before."""
        self._overs.put(over)

    def end(self) -> None:
        """End the watching thread."""
        self._overs.put(None)

    def _work(self) -> None:
        while (over := self._overs.get()) is not None:
            over.watch()
