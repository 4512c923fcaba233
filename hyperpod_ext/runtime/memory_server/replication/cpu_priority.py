"""The CPU priority of copies beside training: nice values of threads, and of this process among other sessions.

A nice value counts among the threads of one scheduling group. Where the kernel makes a group of each session
(autogroup: hosts on which no CPU cgroup holds the job), workers are in other groups than this process, and
only the group's own nice value counts between them.
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
"""Of two neighbouring nice values, one gets so many times the other's share of a core."""
_AUTOGROUP = Path("/proc/self/autogroup")
_TIMEOUT_S = 10.0
_AGAIN_S = 0.11
"""Who is not root may change the group's value ten times a second."""
_FOR_GOOD = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS}


def niceness_for(max_slowdown: float) -> int:
    """The least nice value at which a thread that never rests makes a thread of training, on the same core, take no
    more than `max_slowdown` longer, as a share; the greatest there is, where none is enough."""
    needed = math.log(1 / max_slowdown) / math.log(_STEP)
    return min(_NICEST, max(0, math.ceil(needed - 1e-9)))


def own_group() -> Path | None:
    """Where this process's scheduling group is told its nice value; None where others are in that group too."""
    return _AUTOGROUP if os.getsid(0) == os.getpid() and _AUTOGROUP.exists() else None


class CpuPriority:
    """That of the copies of one memory server. Thread-safe.

    Args:
        max_slowdown: how much longer training may take beside copies, as a share.
        group: `own_group()`; None: the group is left alone.
    """

    def __init__(self, max_slowdown: float, group: Path | None = None) -> None:
        self._niceness, self._group = niceness_for(max_slowdown), group
        self.timeout_s = _TIMEOUT_S
        """After so long with copies under way the process gives way no more: where training leaves no core idle,
        they would not be done before the next are due."""
        self._timer: threading.Timer | None = None
        self._copies = self._urgent = self._written = self._busy = 0
        self._asking_again = self._late = False
        self._lock = threading.Lock()

    def lower_this_thread(self) -> None:
        """Give this thread, and no other of the process, a lower priority than training."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)

    def lower_process(self, pid: int) -> None:
        """The same for the first thread of another process, and those that it starts."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, self._niceness)

    def copy_begins(self) -> None:
        """From now on the whole process gives way, until as many copies have ended."""
        with self._lock:
            self._copies += 1
            if self._copies == 1 and self._group is not None:
                self._busy += 1
                self._timer = _later(self.timeout_s, functools.partial(self._time_out, self._busy))
            self._tell()

    def copy_ends(self) -> None:
        with self._lock:
            self._copies -= 1
            if self._copies == 0:
                self._late = False
                if self._timer is not None:
                    self._timer.cancel()
            self._tell()

    def unthrottle(self) -> None:
        """The copies that are under way, or those that begin next, do not lower the priority of the process."""
        with self._lock:
            self._late = True
            self._tell()

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """What training waits for, or what is not safe before it is done: the process does not give way meanwhile.
        Its threads that copy still do, to the others."""
        with self._lock:
            self._urgent += 1
            self._tell()
        try:
            yield
        finally:
            with self._lock:
                self._urgent -= 1
                self._tell()

    def _tell(self) -> None:
        wanted = self._niceness if self._copies and not self._urgent and not self._late else 0
        if self._group is None or wanted == self._written or self._asking_again:
            return
        try:
            self._group.write_text(str(wanted))
        except OSError as error:
            if error.errno in _FOR_GOOD:
                self._group = None  # this kernel has no such groups, or they are not ours to change
                return
            self._asking_again = True  # too soon after the last time, say; the value may not stay as it is
            _later(_AGAIN_S, self._tell_again)
        else:
            self._written = wanted

    def _tell_again(self) -> None:
        with self._lock:
            self._asking_again = False
            self._tell()

    def _time_out(self, busy: int) -> None:
        with self._lock:
            if busy == self._busy and self._copies:  # else those copies have just ended, and others have begun
                self._late = True
                self._tell()


def _later(seconds: float, what: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, what)
    timer.daemon = True
    timer.start()
    return timer
