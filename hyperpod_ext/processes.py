"""Linux process care: nothing that this project starts may outlive what started it by accident.

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
"""How long the end of a process that was killed is waited for, if it waits for a disk."""
_not_dying: set[int] = set()
"""Processes that were killed and were alive after that time."""
_REMOVING_S = 10.0
"""How long those may take, once all others have ended that are known. They begin when the last process has that may use
what they remove: torch's DataLoader workers look every 5 s whether who started them lives."""
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}): {os.strerror(errno)}")


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when its parent dies.

    Called in the child. Exits at once if `parent_pid` is no longer the parent: the kernel only
    reports deaths that come after the call.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:
        os._exit(1)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, so that it can wait for them and end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def take_signals_from(
    loop: AbstractEventLoop, handler: Callable[[int, FrameType | None], object] | signal.Handlers
) -> None:
    """From here on `handler` has the signals that ask this process to end, and no more its event loop.

    A loop that closes leaves them to the kernel: one that came then ended the process before it had cleaned up.
    """
    signums = (signal.SIGTERM, signal.SIGINT)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signums)
    for signum in signums:
        loop.remove_signal_handler(signum)
        signal.signal(signum, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def collect_seldom() -> None:
    """Have this process, whose imports are done, look for cycles of dead objects after 100,000 new ones, not after 700.

    A fault of a large job is tens of thousands of small messages at once, none of which is part of a cycle: an eighth
    of what they cost the coordinator was looking for some.
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def allow_open_files(count: int) -> bool:
    """Raise this process's soft limit of open files to `count`, as far as its hard limit goes. Children inherit it.

    Returns whether `count` files may be open now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return True
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed == count


def children(pid: int) -> list[int]:
    """Process ids of the children of `pid`, those that have ended and were not reaped among them."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process ended while it was looked at
        for each in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread ended since the listing
                found += [int(child) for child in each.read_text().split()]
    return found


def descendants(pid: int, *, spare: Collection[int] = ()) -> list[int]:
    """Process ids of all living children of `pid`, and theirs, parents before children; none of `spare`."""
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
    """SIGKILL every descendant of `pid`, until none is left; returns the ids that were killed.

    Only reliable in a subreaper (or when `pid` is one): elsewhere orphans escape to init. What has ended before is
    reaped.

    Args:
        spare: children of `pid` that stay, with all that is theirs.
    """
    return _kill_all(lambda: [child for child in descendants(pid, spare=spare) if not _reaped(child)])


def _kill_all(find: Callable[[], list[int]]) -> list[int]:
    """SIGKILL the processes that `find` gives, until it gives none; returns the ids that were killed.

    Those that remove what dead processes left in shared memory are the last, and have a moment for it. A process that
    waits for a disk ends when that answers, which may be never: it is left alone after some seconds.
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
    """Whether it was killed long ago, and waits for a disk still."""
    return pid in _not_dying and process_state(pid) == _STATES["D"]


_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a disk", "Z": "ended", "X": "ended"}


def process_state(pid: int) -> str:
    """State of a process in words: of its threads, the first that is not running or waiting as usual."""
    states = ""
    with contextlib.suppress(OSError):
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            states += stat.read_text().rpartition(")")[2].split()[0]
    return next((words for letter, words in _STATES.items() if letter in states), "running" if states else "ended")


def kill_group(leader: int) -> None:
    """SIGKILL a process group: a process and what it has forked, while it ends or after it has.

    Those that remove what dead processes left in shared memory stay: they end by themselves.
    """
    seen: set[int] = set()
    while found := {pid for pid in _members(leader) if not _removes_leftovers(pid)} - seen:
        seen |= found
        for pid in found:
            send_signal(pid)


def _members(group: int) -> set[int]:
    """Processes of a group, whoever their parents are by now."""
    pids = {int(name) for name in os.listdir("/proc") if name.isdecimal()}  # noqa: PTH208  (half the time)
    return {pid for pid in pids if _group_of(pid) == group}


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def kill_started_for(folder: Path) -> None:
    """SIGKILL every process that was started with a variable `HPX_...` that names `folder`, or a path in it, until none
    is left."""
    variable = re.compile(rb"HPX_\w+=" + re.escape(os.fsencode(folder)) + rb"(/|$)")
    _kill_all(lambda: _started_with(variable))


def _started_with(variable: re.Pattern[bytes]) -> list[int]:
    """Living processes, but for this one, with an environment variable whose name and value begin so."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            # it has ended meanwhile, or is another user's
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if any(map(variable.match, (entry / "environ").read_bytes().split(b"\0"))):
                    found.append(int(entry.name))
    return [pid for pid in found if is_alive(pid)]


def describe_exit(status: int) -> str:
    """`os.wait` status in words: `killed by SIGKILL (9)`, `exit code 3`."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"killed by {signal.Signals(number).name} ({number})"
    return f"exit code {os.waitstatus_to_exitcode(status)}"


def is_alive(pid: int) -> bool:
    """Whether it runs: a process that has ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _reaped(pid: int) -> bool:
    """Whether it does not run any more. A child of ours that has ended is reaped."""
    if is_alive(pid):
        return False
    with contextlib.suppress(ChildProcessError):  # not ours: its parent reaps it
        os.waitpid(pid, os.WNOHANG)
    return True


def _removes_leftovers(pid: int) -> bool:
    """Whether it is a process of Python or torch that removes segments of shared memory whose owners were killed."""
    try:
        return any(name in Path(f"/proc/{pid}/cmdline").read_bytes() for name in _REMOVERS)
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait_gone(pid: int, limit_s: float | None = None) -> None:
    """Block until `pid` has died; reaps it when it is our own child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([handle], [], [], limit_s)
    finally:
        os.close(handle)
    with contextlib.suppress(ChildProcessError):  # not ours: its parent reaps it
        os.waitpid(pid, os.WNOHANG)
