"""Functions for Linux processes, which ensure that no started process outlives the process that started it.

The module needs only the standard library, because both the engine of local jobs and the container's agent import it.
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
"""Seconds to wait for the end of a killed process. The wait is limited because a killed process may wait for a disk for
ever."""
_not_dying: set[int] = set()
"""Ids of killed processes that were still alive after `_DIES_S` seconds."""
_REMOVING_S = 10.0
"""Seconds that the processes in `_REMOVERS` may take to remove shared memory after all other processes have ended. The
processes in `_REMOVERS` begin only when the last user of the shared memory has ended. torch's DataLoader workers, which
use shared memory, check only every 5 s whether their parent is alive."""
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}): {os.strerror(errno)}")


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Make the kernel send `signum` to this process, a child process, when its parent dies.

    If the parent has died already, this process exits immediately, because the kernel sends no signal for a death
    before the call.

    Args:
        parent_pid: process id of the expected parent.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:
        os._exit(1)


def become_subreaper() -> None:
    """Make this process the new parent of descendants whose parent dies, so that this process can wait for and kill
    them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def take_signals_from(
    loop: AbstractEventLoop, handler: Callable[[int, FrameType | None], object] | signal.Handlers
) -> None:
    """Remove the event loop's handlers of SIGTERM and SIGINT, and install `handler` for both signals.

    The function is needed because an event loop restores the default handlers when it closes. With a default handler, a
    signal would end the process before the process has cleaned up.
    """
    signums = (signal.SIGTERM, signal.SIGINT)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signums)
    for signum in signums:
        loop.remove_signal_handler(signum)
        signal.signal(signum, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_and_forward(pid: int, *signums: signal.Signals) -> int:
    """Wait until a child process has ended, and send it each signal of `signums` that this process receives.

    A Python handler cannot send the signals, because it does not run if a signal arrives just before a blocking call.
    The process ignores the signals when this function has returned.

    Returns:
        The status of the child process, as `os.waitpid` returns it.
    """
    received, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    for signum in signums:
        signal.signal(signum, lambda _signum, _frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signums)
    poll = select.poll()
    poll.register(ended := os.pidfd_open(pid), select.POLLIN)
    poll.register(received, select.POLLIN)
    while ended not in {descriptor for descriptor, _ in poll.poll()}:
        for number in os.read(received, 4096):
            if number in signums:
                os.kill(pid, number)
    for signum in signums:  # at its exit, Python replaces handlers by the default action, which would kill the process
        signal.signal(signum, signal.SIG_IGN)
    return os.waitpid(pid, 0)[1]


def collect_seldom() -> None:
    """Make Python's garbage collector run after 100,000 new objects instead of 700. Call this function after all
    imports.

    A fault in a large job causes tens of thousands of small messages, which contain no reference cycles. Without this
    setting, garbage collection took an eighth of the coordinator's time.
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def allow_open_files(count: int) -> bool:
    """Raise this process's soft limit for open files to `count`, or to a lower hard limit. Child processes inherit the
    soft limit.

    Returns:
        Whether this process may now have `count` open files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return True
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed == count


def children(pid: int) -> list[int]:
    """Return the process ids of the children of `pid`, including zombies (ended children that were not reaped)."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ignore a process that has ended
        for each in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ignore a thread that has ended
                found += [int(child) for child in each.read_text().split()]
    return found


def descendants(pid: int, *, spare: Collection[int] = ()) -> list[int]:
    """Return the process ids of all descendants of `pid`, parents before children. Processes in `spare` and their
    descendants are left out."""
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
    """Send SIGKILL to every descendant of `pid` until none is left, and return the ids of the killed processes. Ended
    children of this process are reaped.

    The function is only reliable if this process or `pid` is a subreaper (see `become_subreaper`). Without a subreaper,
    descendants whose parent has died become children of init and are not found.

    Args:
        spare: children of `pid` that are not killed; their descendants are not killed either.
    """
    return _kill_all(lambda: [child for child in descendants(pid, spare=spare) if not _reaped(child)])


def _kill_all(find: Callable[[], list[int]]) -> list[int]:
    """Send SIGKILL to the processes that `find` returns, until `find` returns no process; return the killed processes.

    Processes that remove segments of shared memory (`_REMOVERS`) are killed last, after `_REMOVING_S` seconds. A killed
    process that still waits for a disk after `_DIES_S` seconds is ignored, because it may never end.
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
    """Return whether a process was killed, did not end within `_DIES_S` seconds, and still waits for a disk."""
    return pid in _not_dying and process_state(pid) == _STATES["D"]


_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a disk", "Z": "ended", "X": "ended"}


def process_state(pid: int) -> str:
    """Return the state of a process as text, such as `running`. A thread that is stopped, has ended or waits for a disk
    determines the state."""
    states = ""
    with contextlib.suppress(OSError):
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            states += stat.read_text().rpartition(")")[2].split()[0]
    return next((words for letter, words in _STATES.items() if letter in states), "running" if states else "ended")


def kill_group(leader: int) -> None:
    """Send SIGKILL to all processes of the process group `leader`, even if the group's leader has ended.

    Processes that remove segments of shared memory (`_REMOVERS`) are not killed, because they end by themselves.
    """
    seen: set[int] = set()
    while found := {pid for pid in _members(leader) if not _removes_leftovers(pid)} - seen:
        seen |= found
        for pid in found:
            send_signal(pid)


def _members(group: int) -> set[int]:
    """Return the ids of all processes in a process group, with any parents."""
    pids = {int(name) for name in os.listdir("/proc") if name.isdecimal()}  # noqa: PTH208  (half the time)
    return {pid for pid in pids if _group_of(pid) == group}


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def kill_started_for(folder: Path) -> None:
    """Send SIGKILL to every process that has an environment variable `HPX_...` with the path of `folder` or a path in
    it, until no such process is alive."""
    variable = re.compile(rb"HPX_\w+=" + re.escape(os.fsencode(folder)) + rb"(/|$)")
    _kill_all(lambda: _started_with(variable))


def _started_with(variable: re.Pattern[bytes]) -> list[int]:
    """Return the ids of living processes, except this process, that have an environment variable matching
    `variable`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            # skip a process that has ended in the meantime or belongs to another user
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if any(map(variable.match, (entry / "environ").read_bytes().split(b"\0"))):
                    found.append(int(entry.name))
    return [pid for pid in found if is_alive(pid)]


def describe_exit(status: int) -> str:
    """Return a status from `os.wait` as text, such as `killed by SIGKILL (9)` or `exit code 3`."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"killed by {signal.Signals(number).name} ({number})"
    return f"exit code {os.waitstatus_to_exitcode(status)}"


def is_alive(pid: int) -> bool:
    """Return whether a process is alive. A zombie, which has ended but was not reaped, is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _reaped(pid: int) -> bool:
    """Return whether a process has ended, and reap it if it is a child of this process."""
    if is_alive(pid):
        return False
    with contextlib.suppress(ChildProcessError):  # the parent reaps a process that is not a child of this process
        os.waitpid(pid, os.WNOHANG)
    return True


def _removes_leftovers(pid: int) -> bool:
    """Return whether `pid` is the helper process of Python or torch that removes shared memory of killed processes."""
    try:
        return any(name in Path(f"/proc/{pid}/cmdline").read_bytes() for name in _REMOVERS)
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_readable(descriptor: int, limit_s: float | None = None) -> bool:
    """Wait until a file descriptor can be read, at most `limit_s` seconds. Return whether the descriptor can be read.
    `poll` is used, because `select` refuses descriptors above 1023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if limit_s is None else limit_s * 1000))


def _wait_gone(pid: int, limit_s: float | None = None) -> None:
    """Wait until the process `pid` has ended, at most `limit_s` seconds, and reap it if it is a child of this
    process."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        wait_readable(handle, limit_s)
    finally:
        os.close(handle)
    with contextlib.suppress(ChildProcessError):  # the parent reaps a process that is not a child of this process
        os.waitpid(pid, os.WNOHANG)
