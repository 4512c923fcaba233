"""Reads event logs of this version and of earlier versions, and reports unreadable lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.files import open_regular
from hyperpod_ext.runtime.events.event import VERSION, Event, Events, Other
from hyperpod_ext.runtime.events.kinds import KINDS
from hyperpod_ext.runtime.events.of_training import LogBegun
from hyperpod_ext.runtime.ipc import fast_json
from hyperpod_ext.runtime.ipc.messages import WireError

_STEP = (b'"event":"step"', b'"event": "step"')
_HEAD = 64
"""Number of bytes at the start of a line within which the kind of its event is found."""
_LONGEST_LINE = 4 << 20
"""Maximum number of bytes of a line that are read."""
_LOST = re.compile(r"(\d{1,9}) events could not be written here: (.{,200})")
_EARLIEST, _LATEST = -1e9, 1e11
"""Earliest and latest valid time of an event, in seconds. As Unix time, the limits are the years 1938 and 5138."""
_REMOVE = "the file is damaged there; remove the line, or name another log"


@dataclass(frozen=True, slots=True)
class LogRead:
    """The contents of an event log."""

    events: Events
    damaged: Problem | None
    """The problem with the first unreadable line; None if all lines are readable."""
    notes: tuple[str, ...]
    """Sentences about lines or events that were left out."""
    lost: tuple[int, str] = (0, "")
    """Number of events that could not be written, for example to a full disk, and the reason."""

    def all_events(self) -> Events:
        """Return all events, if the whole log is readable.

        Raises:
            ConfigError: a line is unreadable.
        """
        if self.damaged is not None:
            raise ConfigError([self.damaged])
        return self.events


def read_log(lines: Iterable[str], source: str) -> LogRead:
    """Return the events in a log's lines. `source` is the log's name in messages. An incomplete last line is left
    out."""
    events, notes = Events(), list[str]()
    damaged: Problem | None = None
    lost, why = 0, ""
    truncated: int | None = None
    for number, line in enumerate(lines, 1):
        if truncated is not None:
            damaged = damaged or Problem("is not an event", source=source, line=truncated, hint=_REMOVE)
            truncated = None
        if not line.strip():
            continue
        if (mark := _LOST.fullmatch(line.rstrip())) is not None:
            lost, why = lost + int(mark[1]), mark[2]
            continue
        entry = parse_line(line)
        if entry is None:
            truncated = number
            continue
        try:
            event = KINDS.read(entry)
        except WireError as error:
            damaged = damaged or Problem(f"is not an event: {error}", source=source, line=number, hint=_REMOVE)
            continue
        if isinstance(event, LogBegun):
            damaged = damaged or _newer(event.version, source, number)
            continue
        events.append(event)
        if isinstance(event, Other) and event.why:
            notes.append(f"{source}:{number}: {event.why}; the event was left out")
    if truncated is not None:
        notes.append(f"{source}:{truncated}: the last line is cut off; it was left out")
    if lost:
        notes.append(lost_note(source, lost, why))
    return LogRead(events, damaged, tuple(notes), (lost, why))


def lost_note(source: str, count: int, why: str) -> str:
    """Return a sentence about `count` events that are missing in the log `source`."""
    return f"{source}: {count} events could not be written: {why}. Figures from this log do not include them."


def read_events(path: Path, *, nbytes: int | None = None, steps: bool = True, must_exist: bool = False) -> LogRead:
    """Return the events in a file. If the file is missing, return no events, or raise if `must_exist`.

    Args:
        nbytes: number of bytes to read at most, because the file may still grow; None for all.
        steps: whether to include events of steps, which are nearly all lines of a long log.
    """
    try:
        with open_regular(path) as file:
            return read_log(_lines(file, nbytes, steps), str(path))
    except FileNotFoundError:
        if must_exist:
            raise
        return LogRead(Events(), None, ())


def complete_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file. Only the first `_LONGEST_LINE` bytes of a longer line are yielded."""
    while line := file.readline(_LONGEST_LINE):
        yield line
        while len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
            line = file.readline(_LONGEST_LINE)


def _lines(file: IO[bytes], nbytes: int | None, steps: bool) -> Iterator[str]:
    """Yield the lines of a file. A line that is left out is yielded as "", so that line numbers stay correct."""
    for line in complete_lines(file):
        if nbytes is not None:
            if nbytes <= 0:
                return
            line, nbytes = line[:nbytes], nbytes - len(line)
        left_out = not steps and any(line.find(kind, 0, _HEAD) >= 0 for kind in _STEP)
        yield "" if left_out else line.decode(errors="replace")


def read_followed(entry: Mapping[str, Any]) -> Event | None:
    """Return the event in a log line of a running job; None if it is unreadable. The final report explains unreadable
    lines."""
    try:
        return KINDS.read({key: value for key, value in entry.items() if key != "run"})
    except WireError:
        return None


def parse_line(line: str | bytes) -> dict[str, Any] | None:
    """Parse a log line into a dict; None if the line is not an event."""
    try:
        entry = fast_json.load(line)
    except (ValueError, RecursionError):
        return None
    is_event = isinstance(entry, dict) and is_moment(entry.get("t"))
    return entry if is_event and isinstance(entry.get("event"), str) else None


def is_moment(value: object) -> bool:
    """Return whether `value` is a plausible time in seconds."""
    return isinstance(value, int | float) and _EARLIEST < value < _LATEST


def _newer(version: int, source: str, line: int) -> Problem | None:
    if version <= VERSION:
        return None
    message = f"is of version {version} of the event log, and this version of hyperpod_ext reads up to {VERSION}"
    return Problem(message, source=source, line=line, hint="read it with the version that wrote it, or a later one")
