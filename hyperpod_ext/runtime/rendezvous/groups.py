"""Opening, freeing and closing torch's process groups.

Stock torch cannot abort a gloo operation in flight: a survivor that is not the dead rank's neighbour
waits out the whole timeout. An end of file on the group's own sockets makes every pending operation
raise within milliseconds. Four things about it were learned the hard way:

- Listeners must be left alone: gloo terminates the process over them.
- Only reading is shut down. When a write fails on gloo's event thread, the operation it belonged to is
  neither pending nor queued at that moment, nobody tells its waiter, and it sleeps out the timeout.
- For the like reason a message in the middle of its transfer is let through first: when its socket ends,
  gloo tells those who wait in line, and not the one whose bytes were arriving.
- For the same reason no survivor may see another's socket close before it was cut itself: each keeps
  its connections open, through duplicates, until all have left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.rendezvous.store import PartitionedStore

_make_group = dist.distributed_c10d._new_process_group_helper


class ProcessGroups:
    """The default process group of one generation, those that the script makes beside it (a device mesh has
    some), and the sockets they opened."""

    def __init__(self) -> None:
        self._inodes: set[int] = set()
        self._held: list[socket.socket] = []
        self._store: PartitionedStore | None = None
        self._cut = False
        self._lock = threading.Lock()

    def open(self, store: PartitionedStore, rank: int, world_size: int) -> None:
        """`init_process_group` on `store`. May be cut from another thread meanwhile.

        Call it once every rank has left the former group.
        """
        if dist.is_initialized():
            raise JobFailedError(
                "a process group is open already; under @resilient the groups are opened for the script",
                hint="Remove init_process_group (and destroy_process_group) from the script.",
            )
        with self._lock:
            self._store, self._cut = store, False
        self._let_go()
        before = set(_sockets())
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        with self._lock:
            self._inodes = set(_sockets()) - before
            late = self._cut
        dist.distributed_c10d._new_process_group_helper = self._make  # nobody tells us of them otherwise
        if late:
            self.cut()

    def _make(self, *arguments: Any, **options: Any) -> Any:
        before = set(_sockets())
        try:
            return _make_group(*arguments, **options)
        finally:
            with self._lock:
                self._inodes |= set(_sockets()) - before
                late = self._cut
            if late:
                self.cut()

    def cut(self) -> None:
        """Make whatever waits in the group raise, now. Safe from any thread, at any time, repeatedly."""
        with self._lock:
            self._cut = True
            inodes, store = self._inodes, self._store
        if store is not None:
            store.cancel()
        found = [_duplicate(fd, inode) for inode, fd in _sockets().items() if inode in inodes]
        connections = [connection for connection in found if connection is not None]
        with self._lock:
            self._held += connections
        _wait_until_quiet(connections)
        for connection in connections:
            with contextlib.suppress(OSError):  # the other side is dead, and gloo has heard of it
                connection.shutdown(socket.SHUT_RD)

    def destroy(self) -> None:
        """Destroy the groups. Call with no DDP module or work handle of them alive, or their threads stay."""
        dist.distributed_c10d._new_process_group_helper = _make_group
        if dist.is_initialized():
            _wait_until_idle()
            dist.destroy_process_group()
        # torch numbers groups in a process, and names their keys by it. An init that failed has counted too,
        # and torch forgets only what it destroyed: survivors would look for a newcomer under another name
        dist.distributed_c10d._world.group_count = 0
        with self._lock:
            self._inodes = set()
            if self._store is not None:
                self._store.close()
            self._store = None

    def close(self) -> None:
        """Destroy the group when every rank is done with it."""
        self.destroy()
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            held, self._held = self._held, []
        for connection in held:
            connection.close()


def _wait_until_quiet(connections: list[socket.socket], limit_s: float = 0.2) -> None:
    """Until no byte has been on its way for three looks, a millisecond apart: survivors wait, traffic ends."""
    deadline, calm = time.monotonic() + limit_s, 0
    while calm < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
        calm = 0 if any(_bytes_on_their_way(connection) for connection in connections) else calm + 1


def _bytes_on_their_way(connection: socket.socket) -> bool:
    """Whether either direction holds bytes that have not been read, or not been acknowledged."""
    for request in (termios.FIONREAD, termios.TIOCOUTQ):
        with contextlib.suppress(OSError):  # not connected any more
            if int.from_bytes(fcntl.ioctl(connection, request, b"\0" * 4), sys.byteorder):
                return True
    return False


def _wait_until_idle(limit_s: float = 2.0) -> None:
    """Until no thread of gloo has anything left to clean up.

    The group's destructor joins them and holds the GIL meanwhile; one that still has to let go of a tensor
    waits for the GIL. Whoever destroys the group right after its last operation then hangs for good.
    """
    deadline, calm = time.monotonic() + limit_s, 0
    while calm < 2 and time.monotonic() < deadline:
        time.sleep(0.0005)  # gives the GIL to whoever needs it
        calm = calm + 1 if all(state == "S" for state in _gloo_thread_states()) else 0


def _gloo_thread_states() -> list[str]:
    """Kernel's state of each thread that runs gloo's operations. Read without the GIL, so one that waits
    for the GIL has got it, and is not asleep."""
    states = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name.startswith("pt_gloo"):
                states.append(rest.split()[0])
    return states


def _sockets() -> dict[int, int]:
    """Open sockets of this process: inode to descriptor."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (names only, no Path objects on this path)
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is gone by now
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def _duplicate(fd: int, inode: int) -> socket.socket | None:
    """Another descriptor of the connection, checked by inode so that a reused number is never hit."""
    try:
        duplicate = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None  # closed meanwhile
    is_ours = os.fstat(duplicate.fileno()).st_ino == inode
    if is_ours and not duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return duplicate
    duplicate.close()
    return None
