"""Describe in one line why a process ended or an exception was raised. Imports nothing heavy."""

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
"""Kind of a fault; `CAUSES` explains each."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One kind of fault, and a row of the table in docs/faults.md."""

    kind: FaultKind
    meaning: str
    """Description of the fault."""
    reported: str
    """Contents of the reported cause."""
    inject: str = ""
    """Options of `hp-ext chaos` that reliably cause it; empty: none do."""
    no_progress: bool = False
    """Whether it is a way of detecting a hang. A repeated hang may be detected differently, so these count as one."""


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
        "an exception that says so, or SIGKILL while the kernel's count of such kills rose (cgroup v2 or v1, else the "
        "machine's)",
        inject="--oom --rank 1",
    ),
    Cause(
        "hang",
        "the rank made no progress and was ended",
        "where, for how long there was no progress, and the line of your script",
        inject="--hang --rank 1 --how deadlock",
        no_progress=True,
    ),
    Cause(
        "heartbeat",
        "the process fell silent and was ended",
        "where, for how long there was no heartbeat, and the line of your script",
        inject="--hang --rank 1 --how gil",
        no_progress=True,
    ),
    Cause(
        "stuck",
        "the process did not leave its generation and was ended",
        "the generation that it did not leave after a fault elsewhere, and the line of your script",
    ),
    Cause(
        "late",
        "the process did not join the next generation in time; its node is there",
        "the generation that it did not join",
    ),
    Cause(
        "stalled",
        "no rank makes progress, and none is behind",
        "which ranks, and where",
        no_progress=True,
    ),
    Cause(
        "log-rule",
        "what rank 0 printed, or did not print, broke a rule of `log_rules`, and the process was ended",
        "the rule's name, how it was broken, and the line",
    ),
    Cause(
        "connection",
        "a connection ended between ranks that all live",
        "what the rank raised when its connection to another one ended",
    ),
    Cause("lost", "the node is gone", "the node, and how it was noticed", inject="--sigkill --node 1"),
)
"""Every kind of fault."""

NO_PROGRESS = frozenset(cause.kind for cause in CAUSES if cause.no_progress)
"""Kinds that detect a hang."""

_MEANINGS = {
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "a mapped file or /dev/shm ran full, or a bad access in native code",
    signal.SIGABRT: "native code gave up",
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
    """Why a process ended."""

    kind: FaultKind
    cause: str
    """One line."""


_LONGEST_LINE = 1_000
_END_OF_LOG = 64 << 10
"""Bytes read at the end of a log; of a longer last line, only its end."""


def decode_exit(status: int, *, kill_reason: str = "", last_log_line: str = "", oom: bool = False) -> ExitCause:
    """Return the cause for a status of `os.wait`.

    Args:
        status: the kernel's status.
        kill_reason: why we killed the process, if we did.
        last_log_line: the last line in its log, for an exception its type and message.
        oom: whether the kernel killed a process here for lack of memory at about that time.
    """
    if kill_reason:
        return ExitCause("heartbeat" if kill_reason.startswith("no heartbeat") else "hang", kill_reason)
    how = describe_exit(status)
    if not os.WIFSIGNALED(status):
        cause = f"{last_log_line} ({how})" if last_log_line and os.waitstatus_to_exitcode(status) > 0 else how
        return ExitCause("out-of-memory" if is_out_of_memory(last_log_line) else "exit", cause)
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL and oom:
        return ExitCause("out-of-memory", f"{how}: by the kernel, which had no memory left for it")
    meaning = _MEANINGS.get(signal.Signals(number)) if number in set(signal.Signals) else None
    return ExitCause("signal", f"{how}: {meaning}" if meaning else how)


def is_out_of_memory(text: str) -> bool:
    """Return whether an exception's line reports that the machine or a device ran out of memory."""
    return any(sign in text for sign in _OUT_OF_MEMORY)


class OomKills:
    """Counts the kernel's kills in this container for lack of memory."""

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroup = proc, cgroup
        self._known = read_oom_kills(proc, cgroup)

    def since_last(self) -> bool:
        """Return whether there were kills since the last call."""
        before, self._known = self._known, read_oom_kills(self._proc, self._cgroup)
        return self._known > before


def read_oom_kills(proc: Path, cgroup: Path) -> int:
    """Return the kills counted by our own memory cgroup, version 2 or 1, or else by the whole machine."""
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
    """Return `ValueError: bad sample (train.py:57)`, with the innermost line of the script."""
    text = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, SyntaxError) and error.filename:
        text = error.msg
    where = _line_of(error)
    return f"{type(error).__name__}: {shortened(text)}" + (f" ({where})" if where else "")


def shortened(line: str) -> str:
    """Return a line cut to `_LONGEST_LINE` characters."""
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ... ({len(line):,} characters)"


def last_line(log: Path) -> str:
    """Return the last line of a process's log, for an exception its type and message."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END_OF_LOG))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:  # no such file, or a broken disk
        return ""
    return next((shortened(line.strip()) for line in reversed(lines) if line.strip()), "")


def place_of(error: BaseException) -> str:
    """Return `ValueError at train.py:57`, which stays equal when the error is repeated with other numbers."""
    return f"{type(error).__name__} at {_line_of(error)}"


def _line_of(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if is_users(frame.filename)] or list(frames)
    return f"{Path(places[-1].filename).name}:{places[-1].lineno}" if places else ""


def is_users(filename: str) -> bool:
    """Return whether a file is the script's: neither a library's nor ours."""
    return not (filename.startswith((_OURS, "<")) or "site-packages" in filename or "/lib/python3" in filename)
