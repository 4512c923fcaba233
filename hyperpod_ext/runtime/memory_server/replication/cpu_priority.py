"""The CPU priority of copies during training: nice values of threads, and of this process among other sessions.

A nice value counts among the threads of one scheduling group. If the kernel makes a group for each session (autogroup:
hosts without a CPU cgroup for the job), workers are in other groups than this process, and only the group's own nice
value counts between them.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NICEST = 19
_STEP = 1.25
"""Ratio of the shares of a core of two neighbouring nice values."""
_AUTOGROUP = Path("/proc/self/autogroup")
_TIMEOUT_S = 10.0
_AGAIN_S = 0.11
"""Without root, the group's value may be changed ten times a second."""
_FOR_GOOD = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS}


def niceness_for(max_slowdown: float) -> int:
    """Return the smallest nice value at which a busy thread slows down a training thread on the same core by no more
    than the share `max_slowdown`; the largest nice value if none suffices."""
    needed = math.log(1 / max_slowdown) / math.log(_STEP)
    return min(_NICEST, max(0, math.ceil(needed - 1e-9)))


def own_group() -> Path | None:
    """Return the file with the nice value of this process's scheduling group; None if other processes share it."""
    return _AUTOGROUP if os.getsid(0) == os.getpid() and _AUTOGROUP.exists() else None


class CpuPriority:
    """CPU priority of one memory server's copies. Thread-safe.

    Args:
        max_slowdown: how much longer training may take during copies, as a share.
        group: `own_group()`; None: leave the group alone.
    """

    def __init__(self, max_slowdown: float, group: Path | None = None) -> None:
        self._niceness, self._group = niceness_for(max_slowdown), group
        self.timeout_s = _TIMEOUT_S
        """Longest time of copies with lowered priority: if training leaves no core idle, they would not finish before
        the next ones are due."""
        self._timer: threading.Timer | None = None
        self._copies = self._urgent = self._written = self._busy = 0
        self._asking_again = self._late = False
        self._lock = threading.Lock()

    def lower_this_thread(self) -> None:
        """Give this thread, and no other of the process, a lower priority than training."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)

    def lower_process(self, pid: int) -> None:
        """Lower the priority of another process's first thread, and of the threads that it starts."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, self._niceness)

    def copy_begins(self) -> None:
        """Lower the priority of the whole process until as many copies have ended."""
        with self._lock:
            self._copies += 1
            if self._copies == 1 and self._group is not None:
                self._busy += 1
                self._timer = _later(self.timeout_s, functools.partial(self._time_out, self._busy))
            self._apply()

    def copy_ends(self) -> None:
        with self._lock:
            self._copies -= 1
            if self._copies == 0:
                self._late = False
                if self._timer is not None:
                    self._timer.cancel()
            self._apply()

    def unthrottle(self) -> None:
        """Keep the running copies, or else the next ones, from lowering the priority of the process."""
        with self._lock:
            self._late = True
            self._apply()

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """Keep the normal priority of the process inside: for work that training waits for, or that makes data safe.

        Its copying threads keep a lower priority than its other threads.
        """
        with self._lock:
            self._urgent += 1
            self._apply()
        try:
            yield
        finally:
            with self._lock:
                self._urgent -= 1
                self._apply()

    def _apply(self) -> None:
        wanted = self._niceness if self._copies and not self._urgent and not self._late else 0
        if self._group is None or wanted == self._written or self._asking_again:
            return
        try:
            self._group.write_text(str(wanted))
        except OSError as error:
            if error.errno in _FOR_GOOD:
                self._group = None  # no such groups in this kernel, or no permission
                return
            self._asking_again = True  # for example too soon after the last change: try again
            _later(_AGAIN_S, self._apply_again)
        else:
            self._written = wanted

    def _apply_again(self) -> None:
        with self._lock:
            self._asking_again = False
            self._apply()

    def _time_out(self, busy: int) -> None:
        with self._lock:
            if busy == self._busy and self._copies:  # otherwise those copies have just ended, and others have begun
                self._late = True
                self._apply()


def _later(seconds: float, what: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, what)
    timer.daemon = True
    timer.start()
    return timer
