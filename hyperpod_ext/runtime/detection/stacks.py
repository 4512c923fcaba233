"""Writes the stacks of all threads of a hung process to the process's log, before the process is killed.

`faulthandler` writes the stacks in a signal handler in C, which needs neither the GIL nor the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import time
from pathlib import Path

from hyperpod_ext.files import open_private
from hyperpod_ext.runtime.detection.failure_causes import is_users

DUMP_SIGNAL = signal.SIGRTMIN + 7
"""Signal that makes a worker write its stacks: a real-time signal, because Slurm and Lightning use SIGUSR1."""
_LOOK_S = 0.005
_QUIET_S = 0.04
"""Time in seconds after which a dump that does not grow counts as complete, even if its process uses a core."""
_libc = ctypes.CDLL(None)
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in ')


def state_of(pid: int) -> str:
    """Return the kernel's state of a process: R runs, S sleeps, D waits for a device, T is stopped, Z has ended.

    The result is empty if the process does not exist."""
    return _state_in(Path(f"/proc/{pid}/stat"))


def _state_in(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return ""


def _computes(pid: int) -> bool:
    """Return whether a thread of the process is running or waits for a core."""
    return any(_state_in(stat) == "R" for stat in Path(f"/proc/{pid}/task").glob("*/stat"))


async def dump_stacks(pid: int, log: Path, limit_s: float) -> bool:
    """Make process `pid` write the stacks of its threads to its log. If the process is stopped, it is continued.

    Returns whether the stacks were written within `limit_s` seconds. If no stacks were written, the kernel's state of
    the process is logged.
    """
    stopped = state_of(pid) == "T"
    _note(log, f"--- stack of every thread of process {pid}, which will be killed because it hangs\n")
    before = _size(log)
    with contextlib.suppress(ProcessLookupError):
        if stopped:  # after SIGCONT, the main thread will handle DUMP_SIGNAL
            _libc.tgkill(pid, pid, DUMP_SIGNAL)
            os.kill(pid, signal.SIGCONT)
        else:
            os.kill(pid, DUMP_SIGNAL)
    began = time.monotonic()
    deadline, known, since = began + limit_s, before, began
    while (now := time.monotonic()) < deadline:
        if (size := _size(log)) != known:
            known, since = size, now
        elif known > before and (now - since >= _QUIET_S or not _computes(pid)):
            return True  # the dump is complete
        await asyncio.sleep(_LOOK_S)
    if known > before:
        return True
    _note(log, f"--- no stack of process {pid} within {limit_s:g} s: {_whereabouts(pid)}\n")
    return False


def _note(log: Path, line: str) -> None:
    with contextlib.suppress(OSError), open_private(log, "a") as file:  # a broken disk must not prevent the kill
        file.write(line)


def line_in_script(log: Path, since: int) -> str:
    """Return the script's line in which the main thread was, such as `train.py:57`, from stacks after byte `since` of a
    log."""
    text = ""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(since)
        text = file.read().decode(errors="replace")
    # faulthandler's current thread is the main thread, because the kernel delivers the signal there
    main = text.partition("\nCurrent thread ")[2].partition("\n\n")[0]
    frames = (_FRAME.match(line) for line in main.splitlines())
    own = (frame for frame in frames if frame is not None and is_users(frame["file"]))
    return next((f"{Path(frame['file']).name}:{frame['line']}" for frame in own), "")


def _whereabouts(pid: int) -> str:
    try:
        where = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        where = ""
    return f"it is in state {state_of(pid) or 'gone'}" + (
        f", in the kernel's {where}" if where not in ("", "0") else ""
    )


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0
