"""Linux processes: started processes must not outlive their starter by accident.

Standard library only; shared by the laptop side's local engine and the container's agent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import resource
import select
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_REMOVERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
_DIES_S = 10.0
"""Seconds to wait for the end of a killed process, which may wait for a disk."""
_not_dying: set[int] = set()
"""Killed processes that were still alive after that time."""
_REMOVING_S = 10.0
"""Seconds that _REMOVERS may take after all other processes have ended. They start when the last user of shared memory
has ended, and torch's DataLoader workers check only every 5 s whether their parent lives."""
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}): {os.strerror(errno)}")


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Let the kernel send `signum` to this process when its parent dies.

    Called in the child. Exits at once if `parent_pid` is no longer the parent: the kernel only
    reports deaths that come after the call.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:
        os._exit(1)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, so that it can wait for them and kill them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def take_signals_from(
    loop: AbstractEventLoop, handler: Callable[[int, FrameType | None], object] | signal.Handlers
) -> None:
    """Move SIGTERM and SIGINT from the event loop to `handler`.

    A closing loop restores the default handlers, so that a signal would end the process before it has cleaned up.
    """
    signums = (signal.SIGTERM, signal.SIGINT)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signums)
    for signum in signums:
        loop.remove_signal_handler(signum)
        signal.signal(signum, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def collect_seldom() -> None:
    """Let the garbage collector run after 100,000 new objects instead of 700. Call it after all imports.

    A fault of a large job causes tens of thousands of small messages without cycles, and garbage collection took an
    eighth of the coordinator's time for them.
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def allow_open_files(count: int) -> bool:
    """Raise this process's soft limit of open files to `count`, as far as its hard limit goes. Children inherit it.

    Return whether `count` files may be open now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return True
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed == count


def children(pid: int) -> list[int]:
    """Return process ids of the children of `pid`, also of ended ones that were not reaped."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process ended while it was looked at
        for each in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread ended since the listing
                found += [int(child) for child in each.read_text().split()]
    return found


def descendants(pid: int, *, spare: Collection[int] = ()) -> list[int]:
    """Return process ids of all descendants of `pid`, parents before children, without `spare`."""
    found: list[int] = []
    queue = [pid]
    while queue:
        direct = [child for child in children(queue.pop(0)) if child not in spare]
        found += direct
        queue += direct
    return found


def send_signal(pid: int, signum: int = signal.SIGKILL) -> None:
    """Send a signal to a process, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def kill_descendants(pid: int, *, spare: Collection[int] = ()) -> list[int]:
    """SIGKILL every descendant of `pid` until none is left, and return the killed ids.

    Only reliable if this process or `pid` is a subreaper: otherwise orphans become children of init. Ended children
    are reaped.

    Args:
        spare: children of `pid` that stay, with their descendants.
    """
    return _kill_all(lambda: [child for child in descendants(pid, spare=spare) if not _reaped(child)])


def _kill_all(find: Callable[[], list[int]]) -> list[int]:
    """SIGKILL the processes of `find` until it returns none, and return the killed ids.

    Processes that remove segments of shared memory are killed last, and have some seconds to finish. A process that
    waits for a disk may never end, and is left alone after some seconds.
    """
    killed: list[int] = []
    until: float | None = None
    while living := [pid for pid in find() if not _waits_for_ever(pid)]:
        others = [pid for pid in living if not _removes_leftovers(pid)]
        if not others:
            until = time.monotonic() + _REMOVING_S if until is None else until
            if (left_s := until - time.monotonic()) > 0:
                _wait_gone(living[0], left_s)
                continue
        for pid in others or living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                if pid not in killed:
                    killed.append(pid)
        for pid in others or living:
            _wait_gone(pid, _DIES_S)
            if is_alive(pid):
                _not_dying.add(pid)
    return killed


def _waits_for_ever(pid: int) -> bool:
    """Return whether a process was killed long ago, and still waits for a disk."""
    return pid in _not_dying and process_state(pid) == _STATES["D"]


_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a disk", "Z": "ended", "X": "ended"}


def process_state(pid: int) -> str:
    """Return the state of a process as text: that of its first thread in an unusual state."""
    states = ""
    with contextlib.suppress(OSError):
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            states += stat.read_text().rpartition(")")[2].split()[0]
    return next((words for letter, words in _STATES.items() if letter in states), "running" if states else "ended")


def kill_group(leader: int) -> None:
    """SIGKILL a process group, also after its leader has ended.

    Processes that remove segments of shared memory stay: they end by themselves.
    """
    seen: set[int] = set()
    while found := {pid for pid in _members(leader) if not _removes_leftovers(pid)} - seen:
        seen |= found
        for pid in found:
            send_signal(pid)


def _members(group: int) -> set[int]:
    """Return the processes of a group, with any parent."""
    pids = {int(name) for name in os.listdir("/proc") if name.isdecimal()}  # noqa: PTH208  (half the time)
    return {pid for pid in pids if _group_of(pid) == group}


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def kill_started_for(folder: Path) -> None:
    """SIGKILL every process with a variable `HPX_...` that names `folder` or a path in it, until none is left."""
    variable = re.compile(rb"HPX_\w+=" + re.escape(os.fsencode(folder)) + rb"(/|$)")
    _kill_all(lambda: _started_with(variable))


def _started_with(variable: re.Pattern[bytes]) -> list[int]:
    """Return other living processes with an environment variable that matches."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            # it has ended meanwhile, or is another user's
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if any(map(variable.match, (entry / "environ").read_bytes().split(b"\0"))):
                    found.append(int(entry.name))
    return [pid for pid in found if is_alive(pid)]


def describe_exit(status: int) -> str:
    """Return an `os.wait` status as text: `killed by SIGKILL (9)`, `exit code 3`."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"killed by {signal.Signals(number).name} ({number})"
    return f"exit code {os.waitstatus_to_exitcode(status)}"


def is_alive(pid: int) -> bool:
    """Return whether a process runs. An ended one that was not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _reaped(pid: int) -> bool:
    """Return whether a process has ended, and reap it if it is our child."""
    if is_alive(pid):
        return False
    with contextlib.suppress(ChildProcessError):  # not ours: its parent reaps it
        os.waitpid(pid, os.WNOHANG)
    return True


def _removes_leftovers(pid: int) -> bool:
    """Return whether this is Python's or torch's process that removes segments of shared memory of killed owners."""
    try:
        return any(name in Path(f"/proc/{pid}/cmdline").read_bytes() for name in _REMOVERS)
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_readable(descriptor: int, limit_s: float | None = None) -> bool:
    """Wait until a descriptor can be read, and return whether it can. `select` refuses descriptors above 1023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if limit_s is None else limit_s * 1000))


def _wait_gone(pid: int, limit_s: float | None = None) -> None:
    """Wait until `pid` has ended, and reap it if it is our child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        wait_readable(handle, limit_s)
    finally:
        os.close(handle)
    with contextlib.suppress(ChildProcessError):  # not ours: its parent reaps it
        os.waitpid(pid, os.WNOHANG)
