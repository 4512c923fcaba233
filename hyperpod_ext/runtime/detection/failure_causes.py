"""Why a process ended, or an exception came, in one line that names what it means. Imports nothing heavy."""

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
"""What a fault is; `CAUSES` says what each means."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One kind of fault. docs/faults.md has them as a table."""

    kind: FaultKind
    meaning: str
    """What happened."""
    reported: str
    """What the fault's cause says."""
    inject: str = ""
    """Options of `hp-ext chaos` that lead to it; empty: nothing does each time."""
    no_progress: bool = False
    """Whether it is one of the ways in which a hang is found: one that comes again is not found the same way each time,
    so these count as one."""


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
"""Ways in which a hang is found."""

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
    """How a process ended."""

    kind: FaultKind
    cause: str
    """One line."""


_LONGEST_LINE = 1_000
_END_OF_LOG = 64 << 10
"""Bytes; of a longer last line, its end."""


def decode_exit(status: int, *, kill_reason: str = "", last_log_line: str = "", oom: bool = False) -> ExitCause:
    """What the status of `os.wait` means.

    Args:
        status: as the kernel gives it.
        kill_reason: why we ended it ourselves, if we did.
        last_log_line: last line that it wrote, which for an exception is its type and message.
        oom: the kernel has killed some process here for want of memory, at about that time.
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
    """Whether an exception's line says that memory ran out, of the machine or of a device."""
    return any(sign in text for sign in _OUT_OF_MEMORY)


class OomKills:
    """How often the kernel has killed a process of this container for want of memory."""

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroup = proc, cgroup
        self._known = read_oom_kills(proc, cgroup)

    def since_last(self) -> bool:
        """Whether there were more since this was asked last."""
        before, self._known = self._known, read_oom_kills(self._proc, self._cgroup)
        return self._known > before


def read_oom_kills(proc: Path, cgroup: Path) -> int:
    """Kills counted by our own memory cgroup, of version 2 or 1; where it counts none, by the whole machine."""
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
    """`ValueError: bad sample (train.py:57)`: the innermost line that is neither a library's nor ours."""
    text = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, SyntaxError) and error.filename:
        text = error.msg
    where = _line_of(error)
    return f"{type(error).__name__}: {shortened(text)}" + (f" ({where})" if where else "")


def shortened(line: str) -> str:
    """What a person reads of a line, and a message has room for."""
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ... ({len(line):,} characters)"


def last_line(log: Path) -> str:
    """Last line that a process wrote, which for an exception is its type and message."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END_OF_LOG))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:  # it was never made, or its disk is broken
        return ""
    return next((shortened(line.strip()) for line in reversed(lines) if line.strip()), "")


def place_of(error: BaseException) -> str:
    """`ValueError at train.py:57`: the same whenever it comes again, whatever numbers its message has."""
    return f"{type(error).__name__} at {_line_of(error)}"


def _line_of(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if is_users(frame.filename)] or list(frames)
    return f"{Path(places[-1].filename).name}:{places[-1].lineno}" if places else ""


def is_users(filename: str) -> bool:
    """Whether a line of this file is the script's own: neither a library's nor ours."""
    return not (filename.startswith((_OURS, "<")) or "site-packages" in filename or "/lib/python3" in filename)
