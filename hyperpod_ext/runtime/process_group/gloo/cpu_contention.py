"""Measures how many threads compete for this machine's cores, and yields the cores to other threads.

When a generation is aborted, every rank on a machine needs a core at the same time. A rank that has already left the
generation must not slow down ranks that are still in the generation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from hyperpod_ext.runtime.process_group.gloo.sockets import read_proc

_TURN_S = 0.0005
"""Approximate CPU time, in seconds, that a rank needs to leave a generation (its turn)."""
_TURNS, _LONGEST_S = 3, 0.05
"""Maximum number of turns (`_TURN_S`) and of seconds to wait. Waiting longer does not help if the cores are always
busy."""


def per_core() -> float:
    """Return the number of runnable threads per core on the whole machine, this thread included; 0 if unknown."""
    try:
        running = int(read_proc("/proc/loadavg").split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):  # some sandboxes use a different format of /proc/loadavg
        return 0.0
    return running / (os.cpu_count() or 1)


def turn_s(load: float) -> float:
    """Return the seconds until each of `load` threads per core has had its `_TURN_S`; 0 if every thread has a core."""
    return min(load * _TURN_S, _LONGEST_S) if load > 1 else 0.0


def timeout_s(load: float) -> float:
    """Return the maximum seconds for which waiting is useful, if `load` threads per core compete."""
    return min(_TURNS * turn_s(load), _LONGEST_S)


def yield_cores(timeout_s: float, load: Callable[[], float] = per_core) -> None:
    """Sleep while other threads need the cores, but for at most `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0 and (pause := turn_s(load())):
        time.sleep(min(pause, left))
