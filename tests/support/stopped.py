"""A process that does nothing for a while, as one whose machine is busy, or cut off."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def stopped(pid: int, within_s: float = 10.0) -> Iterator[None]:
    """A process of which no thread runs: none is started or ends meanwhile, and its memory stays where it is.

    Raises:
        TimeoutError: A thread of it still ran `within_s` seconds after it was told to stop.
    """
    os.kill(pid, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + within_s
        while running := [thread for thread, state in _threads(pid) if state != "T"]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {pid} was told to stop {within_s} s ago; its threads {running} still run")
            os.sched_yield()
        yield
    finally:
        with suppress(ProcessLookupError):  # killed meanwhile
            os.kill(pid, signal.SIGCONT)


def _threads(pid: int) -> list[tuple[int, str]]:
    """Number and state of each thread; the name before the state may itself hold brackets and blanks."""
    stats = []
    for place in Path(f"/proc/{pid}/task").iterdir():
        try:
            stats.append((int(place.name), (place / "stat").read_text().rpartition(")")[2].split()[0]))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended between the listing and the reading
    return stats
