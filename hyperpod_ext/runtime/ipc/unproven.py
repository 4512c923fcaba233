"""A limit on unauthenticated connections, whose peers have not yet proved that they have the job's secret."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from hyperpod_ext.processes import allow_open_files

Connection = TypeVar("Connection")


class Unproven(Generic[Connection]):
    """The unauthenticated connections. Each takes one place. Thread-safe.

    If all places are taken, the oldest connection is closed. A peer of the job needs its place for only a few
    milliseconds, while a foreign client would keep it.

    Args:
        places: number of places.
        hang_up: closes a connection. Called without any lock held.
    """

    def __init__(self, places: int, hang_up: Callable[[Connection], object]) -> None:
        self._places, self._hang_up = places, hang_up
        self._waiting: dict[Connection, None] = {}
        """Connections with a place, in order of arrival."""
        self._lock = threading.Lock()

    def enter(self, connection: Connection) -> None:
        """Give a new connection a place. If all places are taken, close the oldest connection."""
        with self._lock:
            self._waiting[connection] = None
            full = len(self._waiting) > self._places
        if full:
            self.hang_up_oldest()

    def leave(self, connection: Connection) -> None:
        """Free the place of a connection that is authenticated or closed. Does nothing if the connection has no
        place."""
        with self._lock:
            self._waiting.pop(connection, None)

    @contextlib.contextmanager
    def place(self, connection: Connection) -> Iterator[None]:
        """Keep a place for a connection during the `with` block. The connection may be closed in the meantime."""
        self.enter(connection)
        try:
            yield
        finally:
            self.leave(connection)

    def hang_up_oldest(self) -> bool:
        """Close the oldest connection. Returns False if there is none."""
        with self._lock:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                return False
            del self._waiting[oldest]
        self._hang_up(oldest)
        return True

    def all(self) -> list[Connection]:
        """Return all connections with a place, oldest first."""
        with self._lock:
            return list(self._waiting)


FILES_A_PLACE = 4
"""Open files that the process must be allowed for each place of an unauthenticated connection. Authenticated
connections use most of these files."""
_OPEN_FILES = 65_536
"""Limit of open files that suffices for a job's processes. The hard limit is often a million, and some programs loop
over all descriptors."""


def places(most: int) -> int:
    """Return the number of places: `most`, or fewer if this process's limit of open files is low.

    Also raises the soft limit of open files, which child processes inherit. On most machines it is only 1,024, so that
    foreign clients could use up all descriptors. gloo keeps every connection to its ports, and aborts its process when
    no descriptor is left.
    """
    allow_open_files(_OPEN_FILES)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft // FILES_A_PLACE))
