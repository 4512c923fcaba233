"""Frees ranks from gloo's collectives after a fault, and helps groups to close.

Stock torch cannot abort a gloo operation in flight: a survivor that is not the dead rank's neighbour
waits out the whole timeout. An end of file on the group's own sockets makes pending operations raise within
milliseconds. Seven things about it were learned the hard way:

- Listeners must be left alone: gloo terminates the process over them.
- Only reading is shut down. When a write fails on gloo's event thread, the operation it belonged to is
  neither pending nor queued at that moment, nobody tells its waiter, and it sleeps out the timeout.
- The like happens to a message in the middle of its transfer, when its sender dies or its socket is cut: gloo tells
  those who wait in line, and not the one whose bytes were arriving. `waits.py` finds who still sleeps, and
  tells him. Where torch lacks what that needs, transfers are given a moment to end before the cut.
- For the same reason no survivor may see another's socket close before it was cut itself: each keeps
  its connections open, through duplicates, until all have left.
- Connections are made when they are first used, where torch can: a full mesh costs the more the more ranks there
  are, to open and to close. Sockets are therefore looked for at the cut, where gloo keeps them, not before it.
- Where gloo keeps them is shared with forked processes. A rank that answered at the listener of its parent's group had
  its own line to the agent cut: the parent's gloo took the connection under a number that was the line's in the rank.
- Where many ranks share few cores, what those do who are out is taken from those who are not: more than half of the
  time until the last was out. So the cut does no more than it must, the first look for forgotten waits comes the later
  the more threads want a core, and who is out gives way before it closes its groups.
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
"""Torch's variable for connections that are made when they are first used."""
_QUIET_LOOK_S = 0.02
"""How often, while groups are destroyed, it is looked for sockets that keep their event threads busy."""
_GROUP_FDS = 8
"""A new group's descriptors are among so many, most often."""
_SIGNS = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")


class Gloo:
    """Gloo's part of the process groups of one generation after the other."""

    def __init__(self) -> None:
        self._waits = LostWakeups.find()
        self._inherited = {loop.address for loop in event_loops()}
        """Where groups listen that were there before: of the process that this one was forked from. Their epoll sets
        are that one's too, and name sockets by its numbers, under which this process has something else."""
        self._near = range(0)
        """Where the descriptors of the only group most likely are; nowhere: there may be more than one."""
        self._held: dict[int, int] = {}
        """Duplicates of connections, by inode."""
        self._world_size = 0
        self._open = self._aborted = False
        self._watcher: AbortWatcher | None = None
        self._over: Over | None = None
        """The generation that the watcher looks after."""
        self._lock = threading.Lock()
        self._aborting = threading.Lock()

    def enter(self, world_size: int, *, lasting: bool) -> None:
        if self._waits is not None:  # a connection that the other side never makes can be given up
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
        if self._aborted:  # it was too early to find all sockets
            self._abort_reading()

    def abort(self) -> None:
        """As the protocol has it. Until `ending`, a thread looks after operations that come too late to be cut."""
        with self._lock:
            watched, self._aborted = self._over is not None, True
        if watched:  # it has been cut
            return
        self._abort_reading(near=self._waits is not None)  # somebody looks at all descriptors a little later
        with self._lock:
            if self._waits and self._watcher and self._over is None and self._open:
                lost_wakeups = LostWakeupMonitor(self._waits, self.loops, self._world_size)
                self._over = Over(lambda: lost_wakeups.look(self._abort_reading()))
                self._watcher.look_after(self._over)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        with self._lock:  # a cut that comes later finds nothing to look after
            over, self._open = self._over, False
        if over is not None:  # ranks that are not free yet wait for the same cores
            timeout_s = cpu_contention.timeout_s(cpu_contention.per_core())
            over.rest(timeout_s)
            cpu_contention.yield_cores(timeout_s)
        if dist.is_initialized():
            wait_until_idle()  # while the watcher is there: threads of gloo may sleep in forgotten waits too
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
        """Event threads of the groups that this process has opened.

        Args:
            near: look for one where it is likely to be, and at all descriptors only if it is not there.
        """
        if near and (loop := next(filter(self._is_own, event_loops_among(self._near, self._held)), None)):
            return [loop]
        return [loop for loop in event_loops(self._held) if self._is_own(loop)]

    def _is_own(self, loop: EventLoop) -> bool:
        return loop.address not in self._inherited

    def _abort_reading(self, *, near: bool = False) -> set[int]:
        """Cut what is open; epoll sets in which gloo still has ends of connections to notice."""
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
        """A duplicate of a connection that has not been cut yet."""
        if connection.inode in self._held:
            return None
        copy = duplicate(connection.fd, connection.inode)
        if copy is not None:
            self._held[connection.inode] = copy
        return copy

    @contextlib.contextmanager
    def _kept_quiet(self) -> Iterator[None]:
        """Keep event threads from turning in circles, also over what becomes readable while groups are destroyed."""
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
    """Until no byte has been on its way for three looks, a millisecond apart: survivors wait, traffic ends."""
    deadline, quiet = time.monotonic() + limit_s, 0
    while connections and quiet < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
        quiet = 0 if any(_bytes_on_their_way(connection) for connection in connections) else quiet + 1


def _bytes_on_their_way(connection: int) -> bool:
    """Whether either direction holds bytes that have not been read, or not been acknowledged."""
    for request in (termios.FIONREAD, termios.TIOCOUTQ):
        with contextlib.suppress(OSError):  # not connected any more
            if int.from_bytes(fcntl.ioctl(connection, request, b"\0" * 4), sys.byteorder):
                return True
    return False
