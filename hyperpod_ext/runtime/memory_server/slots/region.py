"""Slots of one owner in one memfd: shared memory that workers map and that outlives them."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Callable

from hyperpod_ext.runtime.memory_server.slots.slots import Slot

_MADV_POPULATE_WRITE = 23  # Linux 5.14; first touch costs ten times the copy that follows
_STRIDE = 16 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def page_aligned(nbytes: int) -> int:
    """What memory for `nbytes` really takes."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Region:
    """Shared memory cut into slots. Its pages are touched in the background, so that the first save finds them."""

    def __init__(self, name: str, slot_bytes: int, slots: int) -> None:
        self.slot_bytes = page_aligned(slot_bytes)
        self.slots = [Slot() for _ in range(slots)]
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.nbytes)
            # a worker that truncates its mapping must not take this process down with SIGBUS
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.memory = mmap.mmap(self.fd, self.nbytes)
        except OSError:
            os.close(self.fd)
            raise
        self.closed: Callable[[], None] = lambda: None
        """Called when it is: what another process has mapped of it lives on until that lets go."""
        self._closing = False
        self._touched = -_STRIDE  # asked before each stride: the first one is not done yet
        self._populating = threading.Thread(target=self._populate, name=f"populate {name}", daemon=True)
        self._populating.start()

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * len(self.slots)

    def view(self, index: int, nbytes: int) -> memoryview:
        start = index * self.slot_bytes
        return memoryview(self.memory)[start : start + nbytes]

    @property
    def untouched(self) -> int:
        """Bytes that are reserved, but that the system has not given yet; 0 once somebody has seen to all of them."""
        return self.nbytes - max(self._touched, 0) if self._populating.is_alive() else 0

    def close(self) -> None:
        """Give the memory back; mappings that others hold of it live on."""
        self._closing = True
        self._populating.join()
        self.closed()
        os.close(self.fd)
        with contextlib.suppress(BufferError):  # somebody reads it this moment: it goes when that view does
            self.memory.close()

    def _populate(self) -> None:
        populate(self.memory, self._stop_populating)

    def _stop_populating(self) -> bool:
        self._touched = min(self.nbytes, self._touched + _STRIDE)
        return self._closing


def populate(memory: mmap.mmap, stop: Callable[[], bool] = lambda: False) -> None:
    """Touch every page of a writable mapping: those that are not there are made, the others are mapped."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for start in range(0, len(memory), _STRIDE):
        if stop():
            return
        length = min(_STRIDE, len(memory) - start)
        # by way of ctypes, because mmap.madvise keeps the GIL and would stop all other threads
        if _libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE) != 0:
            return  # an older kernel: the first save is slower, nothing else
