"""Describes in one line why a process ended or why an exception was raised. This module imports no heavy modules."""

from __future__ import annotations

import os
import signal
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hyperpod_ext.processes import describe_exit

_OURS = str(Path(__file__).parents[2])

FaultKind = Literal[
    "exception",
    "exit",
    "signal",
    "out-of-memory",
    "hang",
    "heartbeat",
    "stuck",
    "late",
    "stalled",
    "log-rule",
    "connection",
    "lost",
]
"""Kind of a fault. `CAUSES` describes each kind."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Description of one kind of fault, which is also a row of the table in docs/faults.md."""

    kind: FaultKind
    meaning: str
    """Description of the event that causes a fault of this kind."""
    reported: str
    """Contents of the cause that is reported for a fault of this kind."""
    inject: str = ""
    """Options of `hp-ext chaos` that reliably cause a fault of this kind; empty if there are none."""
    no_progress: bool = False
    """Whether faults of this kind are hangs. All kinds of hangs count as the same fault, because a hang that repeats
    may be detected in a different way."""


CAUSES = (
    Cause(
        "exception",
        "the training function raised",
        "the exception's type and message, and the line of your script",
        inject="--exception --rank 1",
    ),
    Cause("exit", "the process exited", "the exit code, and the last line that the process wrote"),
    Cause(
        "signal",
        "the process was killed",
        "the signal's name and number, and what it usually means",
        inject="--sigkill --rank 1",
    ),
    Cause(
        "out-of-memory",
        "memory ran out, of the machine or of a device",
        "an exception about memory, or SIGKILL while the kernel's count of these kills rose (of cgroup v2 or v1, else "
        "of the machine)",
        inject="--oom --rank 1",
    ),
    Cause(
        "hang",
        "the rank made no progress and was killed",
        "phase and step, the time without progress, and the line of your script",
        inject="--hang --rank 1 --how deadlock",
        no_progress=True,
    ),
    Cause(
        "heartbeat",
        "the process had no heartbeat and was killed",
        "phase and step, the time without a heartbeat, and the line of your script",
        inject="--hang --rank 1 --how gil",
        no_progress=True,
    ),
    Cause(
        "stuck",
        "the process did not leave its generation and was killed",
        "the generation that it did not leave after another rank's fault, and the line of your script",
    ),
    Cause(
        "late",
        "the process did not join the next generation in time, although its node is alive",
        "the generation that it did not join",
    ),
    Cause(
        "stalled",
        "no rank makes progress, and no rank is behind the others",
        "the ranks, and their phase and step",
        no_progress=True,
    ),
    Cause(
        "log-rule",
        "rank 0's output broke a rule of `log_rules`, and the process was killed",
        "the rule's name, how it was broken, and the line",
    ),
    Cause(
        "connection",
        "a connection between ranks ended, although all ranks are alive",
        "the exception that the rank raised when its connection to another rank ended",
    ),
    Cause("lost", "the node is lost", "the node, and how its loss was noticed", inject="--sigkill --node 1"),
)
"""Descriptions of all kinds of faults."""

NO_PROGRESS = frozenset(cause.kind for cause in CAUSES if cause.no_progress)
"""Kinds of faults that are hangs, however they were detected."""

_MEANINGS = {
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "no space left for a mapped file or /dev/shm, or a bad access in native code",
    signal.SIGABRT: "native code aborted",
    signal.SIGFPE: "a division in native code",
    signal.SIGILL: "an instruction that this processor does not have",
}
_OUT_OF_MEMORY = (
    "OutOfMemoryError",
    "MemoryError",
    "can't allocate memory",
    "Cannot allocate memory",
    "std::bad_alloc",
)


@dataclass(frozen=True, slots=True)
class ExitCause:
    """The kind and the description of the fault that ended a process."""

    kind: FaultKind
    cause: str
    """Description of the cause in one line."""


_LONGEST_LINE = 1_000
_END_OF_LOG = 64 << 10
"""Number of bytes to read at the end of a log, which may be less than the last line."""


def decode_exit(status: int, *, kill_reason: str = "", last_log_line: str = "", oom: bool = False) -> ExitCause:
    """Return the cause of a process's end for its wait status.

    Args:
        status: the wait status, as `os.wait` returns it.
        kill_reason: why hyperpod_ext killed the process; empty if it did not kill it.
        last_log_line: last line in the process's log. After an exception, this is the exception's type and message.
        oom: whether the kernel killed a process on this node for lack of memory at about the same time.
    """
    if kill_reason:
        return ExitCause("heartbeat" if kill_reason.startswith("no heartbeat") else "hang", kill_reason)
    how = describe_exit(status)
    if not os.WIFSIGNALED(status):
        cause = f"{last_log_line} ({how})" if last_log_line and os.waitstatus_to_exitcode(status) > 0 else how
        return ExitCause("out-of-memory" if is_out_of_memory(last_log_line) else "exit", cause)
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL and oom:
        return ExitCause("out-of-memory", f"{how}: by the kernel, because no memory was left")
    meaning = _MEANINGS.get(signal.Signals(number)) if number in set(signal.Signals) else None
    return ExitCause("signal", f"{how}: {meaning}" if meaning else how)


def is_out_of_memory(text: str) -> bool:
    """Return whether an error message says that the memory of the machine or of a device ran out."""
    return any(sign in text for sign in _OUT_OF_MEMORY)


class OomKills:
    """Counts the processes in this container that the kernel has killed for lack of memory."""

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroup = proc, cgroup
        self._known = read_oom_kills(proc, cgroup)

    def since_last(self) -> bool:
        """Return whether the kernel has killed a process for lack of memory since the last call."""
        before, self._known = self._known, read_oom_kills(self._proc, self._cgroup)
        return self._known > before


def read_oom_kills(proc: Path, cgroup: Path) -> int:
    """Return the number of kills for lack of memory that this process's memory cgroup (version 2 or 1) has counted.

    If no cgroup counts kills for lack of memory, return the number for the whole machine."""
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        place = path.lstrip("/")
        if not controllers:
            files = [cgroup / place / "memory.events", cgroup / "memory.events"]
        elif "memory" in controllers.split(","):
            files = [cgroup / "memory" / place / "memory.oom_control", cgroup / "memory/memory.oom_control"]
        else:
            continue
        for file in files:
            if (count := _field(file, "oom_kill")) is not None:
                return count
    return _field(proc / "vmstat", "oom_kill") or 0


def _field(file: Path, name: str) -> int | None:
    return next((int(line.split()[1]) for line in _lines(file) if line.split()[:1] == [name]), None)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def one_line(error: BaseException) -> str:
    """Return a line such as `ValueError: bad sample (train.py:57)`. The line number is of the innermost frame in the
    script."""
    text = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, SyntaxError) and error.filename:
        text = error.msg
    where = _line_of(error)
    return f"{type(error).__name__}: {shortened(text)}" + (f" ({where})" if where else "")


def shortened(line: str) -> str:
    """Return a line; if it is longer than `_LONGEST_LINE` characters, cut it and add its full length."""
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ... ({len(line):,} characters)"


def last_line(log: Path) -> str:
    """Return the last line of a process's log that is not blank. After an exception, this line has the exception's type
    and message."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END_OF_LOG))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:  # the log does not exist, or the disk is broken
        return ""
    return next((shortened(line.strip()) for line in reversed(lines) if line.strip()), "")


def place_of(error: BaseException) -> str:
    """Return a text such as `ValueError at train.py:57`, equal for all repetitions with other messages."""
    return f"{type(error).__name__} at {_line_of(error)}"


def _line_of(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if is_users(frame.filename)] or list(frames)
    return f"{Path(places[-1].filename).name}:{places[-1].lineno}" if places else ""


def is_users(filename: str) -> bool:
    """Return whether a file belongs to the user's script, and not to a library or to hyperpod_ext."""
    return not (filename.startswith((_OURS, "<")) or "site-packages" in filename or "/lib/python3" in filename)
