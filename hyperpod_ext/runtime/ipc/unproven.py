"""Limits the number of unauthenticated connections, that is, connections whose peers have not yet proved that they have
the job's secret."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from hyperpod_ext.processes import allow_open_files

Connection = TypeVar("Connection")


class Unproven(Generic[Connection]):
    """The unauthenticated connections of a server. Thread-safe.

    If there are more than `places` connections, the oldest connection is closed. A process of the job authenticates
    within a few milliseconds, so the oldest connection is most likely from an unknown client.

    Args:
        places: maximum number of unauthenticated connections.
        hang_up: function that closes a connection, and that is called while no lock is held.
    """

    def __init__(self, places: int, hang_up: Callable[[Connection], object]) -> None:
        self._places, self._hang_up = places, hang_up
        self._waiting: dict[Connection, None] = {}
        """The unauthenticated connections, oldest first. The dict is used as an ordered set."""
        self._lock = threading.Lock()

    def enter(self, connection: Connection) -> None:
        """Add a new unauthenticated connection. If there are too many, close the oldest unauthenticated connection."""
        with self._lock:
            self._waiting[connection] = None
            full = len(self._waiting) > self._places
        if full:
            self.hang_up_oldest()

    def leave(self, connection: Connection) -> None:
        """Remove a connection that is now authenticated or closed, unless it was removed before."""
        with self._lock:
            self._waiting.pop(connection, None)

    @contextlib.contextmanager
    def place(self, connection: Connection) -> Iterator[None]:
        """Count a connection as unauthenticated during the `with` block. The connection may be closed during the block,
        to make room for a newer one."""
        self.enter(connection)
        try:
            yield
        finally:
            self.leave(connection)

    def hang_up_oldest(self) -> bool:
        """Close the oldest unauthenticated connection. Returns False if there is no unauthenticated connection."""
        with self._lock:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                return False
            del self._waiting[oldest]
        self._hang_up(oldest)
        return True

    def all(self) -> list[Connection]:
        """Return all unauthenticated connections, oldest first."""
        with self._lock:
            return list(self._waiting)


FILES_A_PLACE = 4
"""The limit of unauthenticated connections is the process's limit of open files, divided by this number. Authenticated
connections need most of the open files."""
_OPEN_FILES = 65_536
"""Soft limit of open files that is enough for the processes of a job. A higher limit, such as the hard limit of often a
million, would slow down programs that loop over all possible descriptors."""


def places(most: int) -> int:
    """Return the maximum number of unauthenticated connections: `most`, or fewer if this process's limit of open files
    is low.

    The soft limit of open files is also raised; child processes inherit this limit. On most machines, the soft limit is
    only 1,024, so unknown clients could use up all descriptors. gloo (a torch backend) never closes connections to its
    ports, and aborts the process when no descriptor is left.
    """
    allow_open_files(_OPEN_FILES)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft // FILES_A_PLACE))
