"""A limit on unauthenticated connections, which have not proved yet that the peer has the job's secret."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from hyperpod_ext.processes import allow_open_files

Connection = TypeVar("Connection")


class Unproven(Generic[Connection]):
    """The unauthenticated connections, each with a place. Thread-safe.

    If all places are taken, the oldest connection is closed: a peer of the job needs its place for some milliseconds
    only, but a stranger would keep it.

    Args:
        places: number of places.
        hang_up: closes a connection; called without any lock.
    """

    def __init__(self, places: int, hang_up: Callable[[Connection], object]) -> None:
        self._places, self._hang_up = places, hang_up
        self._waiting: dict[Connection, None] = {}
        """Connections with a place, in the order of their arrival."""
        self._lock = threading.Lock()

    def enter(self, connection: Connection) -> None:
        """Give a new connection a place; close the oldest one if all places are taken."""
        with self._lock:
            self._waiting[connection] = None
            full = len(self._waiting) > self._places
        if full:
            self.hang_up_oldest()

    def leave(self, connection: Connection) -> None:
        """Free the place of a connection that is authenticated or closed. Do nothing if it has no place."""
        with self._lock:
            self._waiting.pop(connection, None)

    @contextlib.contextmanager
    def place(self, connection: Connection) -> Iterator[None]:
        """Keep a place for a connection during the block. The connection may be closed meanwhile."""
        self.enter(connection)
        try:
            yield
        finally:
            self.leave(connection)

    def hang_up_oldest(self) -> bool:
        """Close the oldest connection; return False if there is none."""
        with self._lock:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                return False
            del self._waiting[oldest]
        self._hang_up(oldest)
        return True

    def all(self) -> list[Connection]:
        """Return all connections with a place, the oldest first."""
        with self._lock:
            return list(self._waiting)


FILES_A_PLACE = 4
"""Required limit of open files per place: most of the files are for authenticated connections."""
_OPEN_FILES = 65_536
"""Enough for a job's processes. The hard limit is often a million, and some programs loop over all descriptors."""


def places(most: int) -> int:
    """Return the number of places: `most`, or fewer if the limit of open files of this process is low.

    Also raises the soft limit of open files, which children inherit. It is 1,024 on most machines, so that strangers
    could use up all descriptors: gloo keeps every connection to its ports, and aborts its process when none is left.
    """
    allow_open_files(_OPEN_FILES)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft // FILES_A_PLACE))
