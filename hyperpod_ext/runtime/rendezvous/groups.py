"""Opening, freeing and closing torch's process groups.

Stock torch cannot abort a gloo operation in flight: a survivor that is not the dead rank's neighbour
waits out the whole timeout. Shutting down the group's own sockets makes every pending operation
raise within milliseconds. Listeners must be left alone: gloo terminates the process over them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading

import torch.distributed as dist

from hyperpod_ext.runtime.rendezvous.store import PartitionedStore


class ProcessGroups:
    """The default process group of one generation, and the sockets it opened."""

    def __init__(self) -> None:
        self._inodes: set[int] = set()
        self._store: PartitionedStore | None = None
        self._cut = False
        self._lock = threading.Lock()

    def open(self, store: PartitionedStore, rank: int, world_size: int) -> None:
        """`init_process_group` on `store`. May be cut from another thread meanwhile."""
        with self._lock:
            self._store, self._cut = store, False
        before = set(_sockets())
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        with self._lock:
            self._inodes = set(_sockets()) - before
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
        for inode, fd in _sockets().items():
            if inode in inodes:
                _shutdown(fd, inode)

    def close(self) -> None:
        """Destroy the group. Call with no DDP module or work handle of it alive, or its sockets stay open."""
        if dist.is_initialized():
            dist.destroy_process_group()
        with self._lock:
            self._inodes = set()
            if self._store is not None:
                self._store.close()
            self._store = None


def _sockets() -> dict[int, int]:
    """Open sockets of this process: inode to descriptor."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (names only, no Path objects on this path)
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is gone by now
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def _shutdown(fd: int, inode: int) -> None:
    """shutdown(2) on a duplicate whose inode is checked, so that a reused number is never hit."""
    try:
        duplicate = socket.socket(fileno=os.dup(fd))
    except OSError:
        return  # closed meanwhile
    with duplicate:
        if os.fstat(duplicate.fileno()).st_ino != inode:
            return
        if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return
        with contextlib.suppress(OSError):  # not connected any more
            duplicate.shutdown(socket.SHUT_RDWR)
