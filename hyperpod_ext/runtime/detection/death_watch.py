"""A worker's death is heard of before its memory has been freed.

A process that is killed has ended for its parent, by SIGCHLD as by pidfd, when the kernel has given back all of its
memory: 0.1 to 0.4 s a GiB on the machines that were measured. Before that, the kernel lets go of the robust mutexes
that its threads hold. So each worker's main thread holds one in the page that it shares with its agent, which waits.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

_AT = 1024
"""Where on the page: the heartbeat lies before it."""
_ATTRIBUTES_BYTES = 64
_PF_EXITING = 0x4
_FLAGS, _EXIT_CODE = 6, 49
"""Fields of /proc/PID/stat, counted from the state."""
_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/neuron0")

_libc = ctypes.CDLL(None, use_errno=True)

_held: list[LivenessLock] = []
"""By threads of this process: the kernel looks for them when those end."""


class LivenessLock:
    """A robust mutex on a worker's page: its main thread holds it for as long as it lives."""

    def __init__(self, path: Path) -> None:
        """On the page at `path`, which exists."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            page = mmap.mmap(descriptor, mmap.PAGESIZE)
        finally:
            os.close(descriptor)
        self._place = ctypes.c_char.from_buffer(page, _AT)  # keeps the page where it is
        self._mutex = ctypes.c_void_p(ctypes.addressof(self._place))

    def prepare(self) -> None:
        """Make the mutex; once, before the worker is there."""
        attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
        _libc.pthread_mutexattr_init(attributes)
        _libc.pthread_mutexattr_setpshared(attributes, 1)
        _libc.pthread_mutexattr_setrobust(attributes, 1)
        _libc.pthread_mutex_init(self._mutex, attributes)

    def hold(self) -> None:
        """Hold it until this thread ends. Called before anybody waits."""
        _held.append(self)
        _libc.pthread_mutex_lock(self._mutex)

    def wait(self) -> bool:
        """Block until nobody holds it; whether its holder has ended. Lets go of the GIL meanwhile."""
        result = _libc.pthread_mutex_lock(self._mutex)
        if result in (0, errno.EOWNERDEAD):  # or it would be on this thread's list of robust mutexes when that ends
            _libc.pthread_mutex_unlock(self._mutex)
        return bool(result == errno.EOWNERDEAD)


def dying_of(pid: int) -> int | None:
    """The status that a process is ending with, as `waitpid` will tell it, if a signal ends it and none of its threads
    runs any more. None: that is not so, or not known yet.

    A thread that ends by itself, or a process that executes another program, lets go of its mutexes, too.
    """
    try:
        if not all(_stat(path)[_FLAGS] & _PF_EXITING for path in Path(f"/proc/{pid}/task").iterdir()):
            return None
        status = _stat(Path(f"/proc/{pid}"))[_EXIT_CODE]
    except (OSError, IndexError):  # it is gone, or a thread has just ended: whoever asks looks again
        return None
    return status if os.WIFSIGNALED(status) else None


def has_gpu() -> bool:
    """Whether this node has a device whose memory a dying process keeps until it has ended."""
    return any(Path(path).exists() for path in _GPUS)


def _stat(process: Path) -> list[int]:
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return [0, *map(int, fields[1:])]  # the state is a letter
