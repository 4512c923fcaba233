"""How many threads want this machine's cores, and leaving the cores to them for a moment.

When a generation is aborted, every rank of a machine wants a core at once. Ranks that are already free slow down those
that are not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from hyperpod_ext.runtime.process_group.gloo.sockets import read_proc

_TURN_S = 0.0005
"""What a rank runs until it is free, roughly."""
_TURNS, _LONGEST_S = 3, 0.05
"""Nobody waits longer than that: where others always want the cores, it is no use."""


def per_core() -> float:
    """Threads of the whole machine that run or could, whoever asks among them, for each core; 0: it is not told."""
    try:
        running = int(read_proc("/proc/loadavg").split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):  # some sandboxes make their own
        return 0.0
    return running / (os.cpu_count() or 1)


def turn_s(load: float) -> float:
    """Seconds until each of so many threads for a core has had its turn; 0 where all have a core."""
    return min(load * _TURN_S, _LONGEST_S) if load > 1 else 0.0


def timeout_s(load: float) -> float:
    """Seconds that such a crowd is worth waiting for."""
    return min(_TURNS * turn_s(load), _LONGEST_S)


def yield_cores(timeout_s: float, load: Callable[[], float] = per_core) -> None:
    """Sleep while others want the cores; for `timeout_s` seconds at most."""
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0 and (pause := turn_s(load())):
        time.sleep(min(pause, left))
