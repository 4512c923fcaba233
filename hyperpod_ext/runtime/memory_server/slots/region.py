"""The slots of one rank (the owner) in one memfd. Workers map this shared memory, which outlives the workers."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable

from hyperpod_ext.runtime.memory_server.slots.slots import Slot

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
# populate pages in advance (since Linux 5.14): allocating a page at its first use takes ten times as long as copying it
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_MADV_COLLAPSE = 25  # since Linux 6.1
_HUGE_PAGE = 2 << 20
_STRIDE = 16 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
_libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def page_aligned(nbytes: int) -> int:
    """Return the size of the memory for `nbytes`, rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Region:
    """Shared memory that is divided into slots. A background thread allocates the pages before the first save."""

    def __init__(self, name: str, slot_bytes: int, slots: int) -> None:
        self.slot_bytes = page_aligned(slot_bytes)
        self.slots = [Slot() for _ in range(slots)]
        self.closed: Callable[[], None] = lambda: None
        """Function to call when this process closes the region. Other processes' mappings of the region stay valid."""
        self._closing = False
        self._touched = 0
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.nbytes)
            # these memfd seals keep a worker from truncating the memory, which would kill this process with SIGBUS
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.memory = map_memory(self.fd, self.nbytes)
            self._populating = threading.Thread(target=self._populate, name=f"populate {name}", daemon=True)
            self._populating.start()
        except OSError:
            os.close(self.fd)
            raise
        except RuntimeError as error:  # the system allows no further thread
            os.close(self.fd)
            raise OSError(errno.EAGAIN, str(error)) from error

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * len(self.slots)

    def view(self, index: int, nbytes: int) -> memoryview:
        start = index * self.slot_bytes
        return self.memory[start : start + nbytes]

    @property
    def untouched(self) -> int:
        """Number of the region's bytes for which the system has not allocated pages yet."""
        return self.nbytes - self._touched if self._populating.is_alive() else 0

    def close(self) -> None:
        """Free this process's memory of the region. Other processes' mappings of the region stay valid."""
        self._closing = True
        self._populating.join()
        self.closed()
        os.close(self.fd)
        self.memory = memoryview(b"")  # the memory is unmapped once its last view is released

    def _populate(self) -> None:
        populate(self.memory, self._may_populate)

    def _may_populate(self, start: int, end: int) -> bool:
        self._touched = start
        return not self._closing


def map_memory(fd: int, nbytes: int, *, private: bool = False) -> memoryview:
    """Map a whole memfd as writable. The mapping's address is a multiple of the huge page size, so that the kernel can
    use huge pages.

    Args:
        private: whether writes are visible only to this process.

    Raises:
        OSError: the system refuses the mapping.
    """
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    # the memfd is mapped inside this larger mapping; unmapping the larger mapping also unmaps the memfd
    around = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=anonymous)
    skipped = -_address(around) % _HUGE_PAGE
    flags = _MAP_FIXED | (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
    wanted = _address(around) + skipped
    if _libc.mmap(wanted, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) != wanted:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return memoryview(around)[skipped : skipped + nbytes]


def populate(
    memory: memoryview, may: Callable[[int, int], bool] = lambda start, end: True, *, make: bool = True
) -> None:
    """Map every page of a writable mapping into this process in advance. Allocates missing pages first.

    Uses huge pages if the system has huge pages, which are allocated faster. With huge pages, a process that maps the
    memory later has 1 page fault instead of 32 in each huge page.

    Args:
        may: called with start and end of each part of the memory before the part is mapped; returns False to stop.
        make: whether to allocate missing pages; false if `may` waits until all pages exist.
    """
    address, in_huge = _address(memory), make
    for start in range(0, len(memory), _STRIDE):
        length = min(_STRIDE, len(memory) - start)
        if not may(start, start + length):
            return
        in_huge = in_huge and _collapse(address + start, length)
        if _advise(address + start, length, _MADV_POPULATE_WRITE if make else _MADV_POPULATE_READ) != 0:
            return  # pages cannot be populated, for example by kernels before 5.14, so the first save will be slower


def _collapse(address: int, nbytes: int) -> bool:
    """Move the contents of memory into huge pages. Returns False if the system has no huge pages."""
    starts = range(address, address + nbytes - nbytes % _HUGE_PAGE, _HUGE_PAGE)
    found = 0
    for start in starts:
        _advise(start, mmap.PAGESIZE, _MADV_POPULATE_READ)  # the kernel joins only existing pages into a huge page
        found += _advise(start, _HUGE_PAGE, _MADV_COLLAPSE) in (0, errno.EAGAIN)
    return found > 0 or not starts


def _advise(address: int, nbytes: int, advice: int) -> int:
    """Call madvise. Returns 0 or the error number. Uses ctypes, because `mmap.madvise` would hold the GIL."""
    return 0 if _libc.madvise(address, nbytes, advice) == 0 else ctypes.get_errno()


def _address(memory: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
