"""Detects a worker's death before the kernel has freed the worker's memory.

SIGCHLD and pidfd report a killed process only after the kernel has freed all of its memory, which took 0.1 to 0.4 s per
GiB on the machines where it was measured. The kernel releases a killed thread's robust mutexes earlier, before it frees
the memory. So each worker's main thread holds a robust mutex in the page that the worker shares with its agent, and the
agent waits for that mutex.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

_AT = 1024
"""Offset in bytes of the mutex in the page, which begins with the heartbeat."""
_ATTRIBUTES_BYTES = 64
_PF_EXITING = 0x4
_FLAGS, _EXIT_CODE = 6, 49
"""Indices of fields in /proc/PID/stat, where the state has index 0."""
_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/neuron0")

_libc = ctypes.CDLL(None, use_errno=True)

_held: list[LivenessLock] = []
"""Locks that threads of this process hold, kept in memory because the kernel reads them when the threads end."""


class LivenessLock:
    """A robust mutex in the page of a worker. The worker's main thread holds the mutex until the thread ends."""

    def __init__(self, path: Path) -> None:
        """Use the mutex in an existing page, which is the file `path`."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            page = mmap.mmap(descriptor, mmap.PAGESIZE)
        finally:
            os.close(descriptor)
        self._place = ctypes.c_char.from_buffer(page, _AT)  # this reference keeps the page mapped
        self._mutex = ctypes.c_void_p(ctypes.addressof(self._place))

    def prepare(self) -> None:
        """Initialize the mutex. The agent calls this once, before the worker starts."""
        attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
        _libc.pthread_mutexattr_init(attributes)
        _libc.pthread_mutexattr_setpshared(attributes, 1)
        _libc.pthread_mutexattr_setrobust(attributes, 1)
        _libc.pthread_mutex_init(self._mutex, attributes)

    def hold(self) -> None:
        """Lock the mutex, and hold it until this thread ends. Call `hold` before another process calls `wait`."""
        _held.append(self)
        _libc.pthread_mutex_lock(self._mutex)

    def wait(self) -> bool:
        """Block until the mutex is free, without the GIL. Returns whether the mutex's holder has ended."""
        result = _libc.pthread_mutex_lock(self._mutex)
        if result in (0, errno.EOWNERDEAD):  # unlock, because the kernel counts the mutex as this thread's
            _libc.pthread_mutex_unlock(self._mutex)
        return bool(result == errno.EOWNERDEAD)


def dying_of(pid: int) -> int | None:
    """Return the `waitpid` status that a process will have, if a signal is ending the process and all its threads have
    stopped.

    Return None if no signal is ending the process, or if this is not known yet. A released mutex does not prove that a
    signal is ending the process: a thread that ends normally, or a process that executes another program, releases its
    mutexes, too.
    """
    try:
        if not all(_stat(path)[_FLAGS] & _PF_EXITING for path in Path(f"/proc/{pid}/task").iterdir()):
            return None
        status = _stat(Path(f"/proc/{pid}"))[_EXIT_CODE]
    except (OSError, IndexError):  # a thread has just ended; callers try again
        return None
    return status if os.WIFSIGNALED(status) else None


def has_gpu() -> bool:
    """Return whether this node has a GPU or Neuron device, whose memory a dying process keeps until its end."""
    return any(Path(path).exists() for path in _GPUS)


def _stat(process: Path) -> list[int]:
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return [0, *map(int, fields[1:])]  # replace the process state, which is a letter, by 0
