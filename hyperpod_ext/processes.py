"""Linux process care: nothing that this project starts may outlive what started it by accident.

Standard library only; shared by the laptop side's local engine and the container's agent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
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


def descendants(pid: int) -> list[int]:
    """Process ids of all living children of `pid`, and theirs, parents before children."""
    found: list[int] = []
    queue = [pid]
    while queue:
        for children in Path(f"/proc/{queue.pop(0)}/task").glob("*/children"):
            try:
                direct = [int(child) for child in children.read_text().split()]
            except (FileNotFoundError, ProcessLookupError):
                continue  # the thread ended between the listing and the read
            found += direct
            queue += direct
    return found


def kill_descendants(pid: int) -> list[int]:
    """SIGKILL every descendant of `pid`, until none is left; returns the ids that were killed.

    Only reliable in a subreaper (or when `pid` is one): elsewhere orphans escape to init.
    """
    killed: list[int] = []
    while living := [child for child in descendants(pid) if is_alive(child)]:
        for child in living:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
            if child not in killed:
                killed.append(child)
        for child in living:
            _wait_gone(child)
    return killed


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


def _wait_gone(pid: int) -> None:
    """Block until `pid` has died; reaps it when it is our own child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([handle], [], [])
    finally:
        os.close(handle)
    with contextlib.suppress(ChildProcessError):  # not ours: its parent reaps it
        os.waitpid(pid, os.WNOHANG)
