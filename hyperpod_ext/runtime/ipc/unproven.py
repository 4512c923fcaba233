"""Connections that have not shown the job's secret yet: so many at a time, apart from those that have."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from hyperpod_ext.processes import allow_open_files

Connection = TypeVar("Connection")


class Unproven(Generic[Connection]):
    """Places for the unproven. When all are taken, the oldest is hung up on: an honest peer needs a place for some
    milliseconds, a stranger would keep it. Thread-safe.

    Args:
        places: how many there are.
        hang_up: ends a connection; called without any lock.
    """

    def __init__(self, places: int, hang_up: Callable[[Connection], object]) -> None:
        self._places, self._hang_up = places, hang_up
        self._waiting: dict[Connection, None] = {}
        """In the order in which they came."""
        self._lock = threading.Lock()

    def enter(self, connection: Connection) -> None:
        """It has just come."""
        with self._lock:
            self._waiting[connection] = None
            full = len(self._waiting) > self._places
        if full:
            self.hang_up_oldest()

    def leave(self, connection: Connection) -> None:
        """It has shown the secret, or is gone. Nothing happens when it has left before."""
        with self._lock:
            self._waiting.pop(connection, None)

    @contextlib.contextmanager
    def place(self, connection: Connection) -> Iterator[None]:
        """It has a place for the block, unless it is hung up on there."""
        self.enter(connection)
        try:
            yield
        finally:
            self.leave(connection)

    def hang_up_oldest(self) -> bool:
        """Make place; False: nobody is there."""
        with self._lock:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                return False
            del self._waiting[oldest]
        self._hang_up(oldest)
        return True

    def all(self) -> list[Connection]:
        """Those that are there, the oldest first."""
        with self._lock:
            return list(self._waiting)


FILES_A_PLACE = 4
"""Open files that a process must be allowed for each place: most are for those who have shown the secret."""
_OPEN_FILES = 65_536
"""As many as a job's processes need; a hard limit is often a million, which some programs count through."""


def places(most: int) -> int:
    """`most`, or fewer where this process may not open many files.

    It may open as many as its hard limit says from here on, and so may its children. The soft one is 1,024 on most
    machines, and strangers could take them all: gloo keeps whoever connects to its ports, and without a file left it
    ends its process.
    """
    allow_open_files(_OPEN_FILES)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft // FILES_A_PLACE))
