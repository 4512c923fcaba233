"""Lowers the CPU priority of copies, with the nice values of threads and of this process's scheduling group.

The kernel compares the nice values of threads only within one scheduling group. On hosts without a CPU cgroup for the
job, the kernel's autogroup feature makes one scheduling group per session. With one group per session, workers and this
process are in different groups, and the kernel compares only the nice values of these groups.
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
"""Factor between the CPU shares of two threads whose nice values differ by 1."""
_AUTOGROUP = Path("/proc/self/autogroup")
_TIMEOUT_S = 10.0
_AGAIN_S = 0.11
"""Seconds between attempts to change the nice value of the scheduling group. For 0.1 s after
a change by any process on the machine, the kernel refuses further changes, except by processes with CAP_SYS_ADMIN."""
_FOR_GOOD = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS}


def niceness_for(max_slowdown: float) -> int:
    """Return the smallest nice value with which a busy thread slows down a training thread on the same core by at most
    the share `max_slowdown`. If no nice value is high enough, return the highest possible nice value."""
    needed = math.log(1 / max_slowdown) / math.log(_STEP)
    return min(_NICEST, max(0, math.ceil(needed - 1e-9)))


def own_group() -> Path | None:
    """Return the file with the nice value of this process's scheduling group. None if this process shares its session,
    and so its scheduling group, with other processes."""
    return _AUTOGROUP if os.getsid(0) == os.getpid() and _AUTOGROUP.exists() else None


class CpuPriority:
    """The CPU priority of one memory server's copies. Thread-safe.

    Args:
        max_slowdown: how much longer training may take during copies, as a share (0.1 for 10 %).
        group: the result of `own_group()`, or None to leave the group's priority unchanged.
    """

    def __init__(self, max_slowdown: float, group: Path | None = None) -> None:
        self._niceness, self._group = niceness_for(max_slowdown), group
        self.timeout_s = _TIMEOUT_S
        """Maximum seconds for which copies run with lowered priority. Without this limit, copies might not finish
        before the next copies are due if training leaves no core idle."""
        self._timer: threading.Timer | None = None
        self._copies = self._urgent = self._written = self._busy = 0
        self._asking_again = self._late = False
        self._lock = threading.Lock()

    def lower_this_thread(self) -> None:
        """Give the calling thread a lower CPU priority than training. Other threads keep their priority."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)

    def lower_process(self, pid: int) -> None:
        """Lower the CPU priority of another process's main thread, and of threads that it starts later."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, self._niceness)

    def copy_begins(self) -> None:
        """Lower the CPU priority of this whole process until all running copies have ended."""
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
        """Restore the normal CPU priority of the process until the running copies have ended. If no copy is running,
        the next copies run with normal priority."""
        with self._lock:
            self._late = True
            self._apply()

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """Keep the process's normal CPU priority inside the `with` block. The method is used for work that training
        waits for, and for work that protects data against loss.

        Even inside the `with` block, copying threads have a lower priority than the other threads of the process.
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
                self._group = None  # the kernel has no autogroup feature, or this process has no permission
                return
            self._asking_again = True  # try again later: for example, the last change was too recent
            _later(_AGAIN_S, self._apply_again)
        else:
            self._written = wanted

    def _apply_again(self) -> None:
        with self._lock:
            self._asking_again = False
            self._apply()

    def _time_out(self, busy: int) -> None:
        with self._lock:
            # `_busy` differs if the copies for which the timer was started have ended and other copies have begun
            if busy == self._busy and self._copies:
                self._late = True
                self._apply()


def _later(seconds: float, what: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, what)
    timer.daemon = True
    timer.start()
    return timer
