"""Detect a worker's death before the kernel has freed its memory.

SIGCHLD and pidfd report a killed process only after the kernel has freed all of its memory: 0.1 to 0.4 s per GiB on the
measured machines. Before that, the kernel releases the robust mutexes of its threads. So each worker's main thread
holds such a mutex in the page that it shares with its agent, and the agent waits for the mutex.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

_AT = 1024
"""Offset in the page, behind the heartbeat."""
_ATTRIBUTES_BYTES = 64
_PF_EXITING = 0x4
_FLAGS, _EXIT_CODE = 6, 49
"""Fields of /proc/PID/stat, counted from the state."""
_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/neuron0")

_libc = ctypes.CDLL(None, use_errno=True)

_held: list[LivenessLock] = []
"""Locks held by threads of this process, kept in memory: the kernel accesses them when the threads end."""


class LivenessLock:
    """A robust mutex on a worker's page, held by the worker's main thread until its end."""

    def __init__(self, path: Path) -> None:
        """Use the existing page at `path`."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            page = mmap.mmap(descriptor, mmap.PAGESIZE)
        finally:
            os.close(descriptor)
        self._place = ctypes.c_char.from_buffer(page, _AT)  # keeps the page mapped
        self._mutex = ctypes.c_void_p(ctypes.addressof(self._place))

    def prepare(self) -> None:
        """Initialize the mutex, once, before the worker starts."""
        attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
        _libc.pthread_mutexattr_init(attributes)
        _libc.pthread_mutexattr_setpshared(attributes, 1)
        _libc.pthread_mutexattr_setrobust(attributes, 1)
        _libc.pthread_mutex_init(self._mutex, attributes)

    def hold(self) -> None:
        """Hold the mutex until this thread ends. Call it before any `wait`."""
        _held.append(self)
        _libc.pthread_mutex_lock(self._mutex)

    def wait(self) -> bool:
        """Block until the mutex is free; return whether its holder has ended. Releases the GIL."""
        result = _libc.pthread_mutex_lock(self._mutex)
        if result in (0, errno.EOWNERDEAD):  # otherwise it would stay on this thread's list of robust mutexes
            _libc.pthread_mutex_unlock(self._mutex)
        return bool(result == errno.EOWNERDEAD)


def dying_of(pid: int) -> int | None:
    """Return the future `waitpid` status of a process that a signal is ending, once none of its threads runs.

    None: not so, or not known yet. A thread that ends by itself, or a process that executes another program, releases
    its mutexes, too.
    """
    try:
        if not all(_stat(path)[_FLAGS] & _PF_EXITING for path in Path(f"/proc/{pid}/task").iterdir()):
            return None
        status = _stat(Path(f"/proc/{pid}"))[_EXIT_CODE]
    except (OSError, IndexError):  # it has ended, or a thread has just ended: callers try again
        return None
    return status if os.WIFSIGNALED(status) else None


def has_gpu() -> bool:
    """Return whether this node has a device with memory that a dying process keeps until its end."""
    return any(Path(path).exists() for path in _GPUS)


def _stat(process: Path) -> list[int]:
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return [0, *map(int, fields[1:])]  # the state is a letter
