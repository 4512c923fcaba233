"""Aborts gloo's collectives after a fault, and helps to close gloo's groups.

torch cannot abort a running gloo operation: a surviving rank that is not connected to the dead rank waits until the
timeout. This module shuts down the group's own sockets, which makes pending operations raise within milliseconds. Seven
facts were found by experiment:

- Listening sockets must not be shut down, because gloo would terminate the process.

- Sockets are shut down only for reading. An operation whose write fails on gloo's event thread is neither pending nor
  queued at that moment, so nothing would wake the operation's thread before the timeout.

- If a sender dies or a socket is shut down in the middle of a transfer, gloo wakes queued operations, but not the
  operation in transfer. `waits.py` finds and ends waits for operations in transfer. If torch lacks the symbols that
  `waits.py` needs, transfers get a moment to finish before the abort.

- A rank must abort its own groups before it sees another survivor close a socket in the middle of a transfer. For this
  reason, each survivor keeps duplicates of its connections open until all survivors have left the generation.

- If torch supports it, connections are made at their first use, because a full mesh of many ranks is expensive to open
  and close. Sockets are searched in gloo's epoll sets at the abort, when the connections in use are known.

- A forked process shares epoll sets with its parent, in which descriptor numbers are the parent's. In one test, a rank
  found a connection of its parent's group in an epoll set, and shut down its own connection to the agent, which had the
  same descriptor number.

- If many ranks share few cores, ranks that have left the generation slow down other ranks, so an abort does only the
  minimum. The more threads compete for cores, the later is the first check for lost wake-ups. A rank that has left the
  generation yields the cores before it closes its groups.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from hyperpod_ext.runtime.process_group.gloo import cpu_contention
from hyperpod_ext.runtime.process_group.gloo.abort_watcher import AbortWatcher, Over
from hyperpod_ext.runtime.process_group.gloo.lost_wakeups import LostWakeupMonitor
from hyperpod_ext.runtime.process_group.gloo.sockets import (
    Connection,
    EventLoop,
    duplicate,
    end_reading,
    event_loops,
    event_loops_among,
    next_descriptor,
    quieten,
)
from hyperpod_ext.runtime.process_group.gloo.waits import LostWakeups, wait_until_idle

LAZY = "TORCH_GLOO_LAZY_INIT"
"""torch's environment variable that makes gloo connect two ranks only at the connection's first use."""
_QUIET_LOOK_S = 0.02
"""Seconds between two searches for sockets that keep event threads spinning, while groups are destroyed."""
_GROUP_FDS = 8
"""Number of consecutive descriptor numbers that a new group usually uses."""
_SIGNS = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")


class Gloo:
    """The backend gloo of the process groups, in all generations of this process."""

    def __init__(self) -> None:
        self._waits = LostWakeups.find()
        self._inherited = {loop.address for loop in event_loops()}
        """Listening addresses of the parent process's groups, which must be skipped: inherited epoll sets contain the
        parent's descriptor numbers, which belong to other files in this process."""
        self._near = range(0)
        """Descriptor numbers that the default group probably uses. The range is empty if the process may have more
        groups than the default group."""
        self._held: dict[int, int] = {}
        """Duplicates of shut-down connections, by inode, which keep the connections open until all ranks have left the
        generation."""
        self._world_size = 0
        self._open = self._aborted = False
        self._watcher: AbortWatcher | None = None
        self._over: Over | None = None
        """The aborted generation that the watcher thread watches; None if it watches no generation."""
        self._lock = threading.Lock()
        self._aborting = threading.Lock()

    def enter(self, world_size: int, *, lasting: bool) -> None:
        # lazy connections need `LostWakeups` to end waits for connections that are never made
        if self._waits is not None:
            if not lasting:
                os.environ.setdefault(LAZY, "1")
            self._watcher = self._watcher or AbortWatcher()
        with self._lock:
            self._world_size, self._open, self._aborted = world_size, True, False
        self._let_go()
        if not dist.is_initialized():
            first = next_descriptor()
            self._near = range(first, first + _GROUP_FDS)

    def adding_group(self) -> None:
        self._near = range(0)

    def opened(self) -> None:
        if self._aborted:  # the abort was too early to find all sockets
            self._abort_reading()

    def abort(self) -> None:
        """See `Backend.abort`. Until `ending`, a thread looks for operations that started too late to be aborted."""
        with self._lock:
            watched, self._aborted = self._over is not None, True
        if watched:  # the groups are aborted already
            return
        self._abort_reading(near=self._waits is not None)  # the watcher soon checks all descriptors
        with self._lock:
            if self._waits and self._watcher and self._over is None and self._open:
                lost_wakeups = LostWakeupMonitor(self._waits, self.loops, self._world_size)
                self._over = Over(lambda: lost_wakeups.look(self._abort_reading()))
                self._watcher.look_after(self._over)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        with self._lock:  # an abort after this block starts no watch
            over, self._open = self._over, False
        if over is not None:  # other ranks on this machine still need the cores
            timeout_s = cpu_contention.timeout_s(cpu_contention.per_core())
            over.rest(timeout_s)
            cpu_contention.yield_cores(timeout_s)
        if dist.is_initialized():
            wait_until_idle()  # wait while the watcher still runs, because gloo's threads may also sleep in lost waits
        if over is not None:
            over.leave()
            self._over = None
        quiet = dist.is_initialized() and self._aborted and bool(self._abort_reading(near=True))
        with self._kept_quiet() if quiet else contextlib.nullcontext():
            yield

    def close(self) -> None:
        self._let_go()
        if self._watcher is not None:
            self._watcher.end()
            self._watcher = None

    def is_broken(self, error: BaseException) -> bool:
        return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)

    def loops(self, *, near: bool = False) -> list[EventLoop]:
        """Return the event loops of the groups that this process has opened.

        Args:
            near: whether to check the descriptors in `_near` first, and other descriptors only if no event loop is
                found.
        """
        if near and (loop := next(filter(self._is_own, event_loops_among(self._near, self._held)), None)):
            return [loop]
        return [loop for loop in event_loops(self._held) if self._is_own(loop)]

    def _is_own(self, loop: EventLoop) -> bool:
        return loop.address not in self._inherited

    def _abort_reading(self, *, near: bool = False) -> set[int]:
        """Shut down the groups' connections for reading.

        Returns the epoll sets in which gloo still waits for events on connections that are shut down."""
        with self._aborting:
            loops = self.loops(near=near)
            found = [self._hold(connection) for loop in loops for connection in loop.connections.values()]
            copies = [copy for copy in found if copy is not None]
            if self._waits is None:
                _wait_until_quiet(copies)
            for copy in copies:
                end_reading(copy)
            return {
                loop.epoll
                for loop in loops
                if any(connection.armed and inode in self._held for inode, connection in loop.connections.items())
            }

    def _hold(self, connection: Connection) -> int | None:
        """Return a duplicate of a connection, to shut the connection down. Returns None if the connection is shut down
        already, or no longer exists."""
        if connection.inode in self._held:
            return None
        copy = duplicate(connection.fd, connection.inode)
        if copy is not None:
            self._held[connection.inode] = copy
        return copy

    @contextlib.contextmanager
    def _kept_quiet(self) -> Iterator[None]:
        """Inside the `with` block, where groups are destroyed, keep gloo's event threads from spinning on sockets."""
        over = threading.Event()

        def work() -> None:
            while True:
                for loop in self.loops():
                    quieten(loop)
                quiet.set()
                if over.wait(_QUIET_LOOK_S):
                    return

        quiet = threading.Event()
        thread = threading.Thread(target=work, name="hpx-quiet", daemon=True)
        thread.start()
        quiet.wait()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _let_go(self) -> None:
        with self._aborting:
            for connection in self._held.values():
                os.close(connection)
            self._held.clear()


def _wait_until_quiet(connections: Sequence[int], limit_s: float = 0.2) -> None:
    """Wait until three checks in a row, a millisecond apart, find no byte in transit. All ranks wait, so transfers
    end."""
    deadline, quiet = time.monotonic() + limit_s, 0
    while connections and quiet < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
        quiet = 0 if any(_bytes_on_their_way(connection) for connection in connections) else quiet + 1


def _bytes_on_their_way(connection: int) -> bool:
    """Return whether the connection has unread received bytes, or unacknowledged sent bytes."""
    for request in (termios.FIONREAD, termios.TIOCOUTQ):
        with contextlib.suppress(OSError):  # the connection is closed
            if int.from_bytes(fcntl.ioctl(connection, request, b"\0" * 4), sys.byteorder):
                return True
    return False
