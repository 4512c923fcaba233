"""The event log and the report of a job in its run directory. A new coordinator appends to its predecessor's log."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.files import open_private, reserve_room, write_atomically
from hyperpod_ext.runtime.events.event import NOTE, VERSION, Event, Events, Other
from hyperpod_ext.runtime.events.kinds import KINDS
from hyperpod_ext.runtime.events.reading import LogRead, lost_note, read_events
from hyperpod_ext.runtime.events.report import make_report
from hyperpod_ext.runtime.ipc import fast_json
from hyperpod_ext.runtime.ipc.messages import WireError

REPORT = "report.json"
_TAIL_BYTES = 1 << 16


def checked(event: str, fields: dict[str, Any], t: float | None = None) -> tuple[Event, bytes]:
    """Check an event, and return it with its log line. `t`: time of the event; None for now.

    If an event does not match its declaration, this is a bug of hyperpod_ext, which must not end a job. The event's
    line gets the error as a note, stderr gets the error once per kind of event, and readers skip the event.
    """
    entry = {"t": time.monotonic() if t is None else t, "event": event, **fields}
    try:
        return KINDS.decode(entry), _line(entry)
    except WireError as error:
        why = str(error)
    if event not in _REPORTED:
        _REPORTED.add(event)
        sys.stderr.write(f"hyperpod_ext: the event log has an event that is not as declared: {why}\n")
    return Other.model_construct(t=entry["t"], name=event, why=why), _line(entry | {NOTE: why})


_REPORTED: set[str] = set()
"""Kinds of events for which stderr already has an error about the declaration."""


def first_line() -> bytes:
    """Return the first line of a new event log."""
    return _line({"t": time.monotonic(), "event": "log", "version": VERSION})


def _line(entry: dict[str, Any]) -> bytes:
    return fast_json.dump(entry) + b"\n"


def append(file: Path, line: bytes) -> None:
    """Append an event's line to a log that has no other writer."""
    with open_private(file, "ab") as log:
        log.write(line if log.tell() else first_line() + line)


class EventLog:
    """Writes lines to events.jsonl. Each write is a single append, so that lines of two writers do not mix.

    Args:
        fresh: whether a new job begins. If a new job begins, an earlier job's log is deleted.
    """

    _together: list[bytes] | None = None
    """Lines collected inside `together`, to be written in one append; None outside of `together`."""
    _lost, _why = 0, ""
    """Number of events lost since the last successful write, and the reason for the loss."""

    _file: io.FileIO | None = None
    """The open log file; None if the file could not be opened yet, which each write tries again."""
    _past_bytes = 0

    def __init__(self, run_dir: Path, *, fresh: bool) -> None:
        self.listeners: list[Callable[[Event], None]] = []
        """Functions that are called with each event after it was written."""
        self.path = run_dir / "events.jsonl"
        if fresh:
            self.path.unlink(missing_ok=True)
            reserve_room(run_dir)
        try:
            self._open()
        except OSError as error:
            if fresh:
                raise  # raise, because before the job starts the user can repair the disk
            self._cannot_write(error, 0)

    def _open(self) -> io.FileIO:
        """Open the log file. Write the first line if the file is empty.

        Raises:
            OSError: the file cannot be written.
        """
        with contextlib.ExitStack() as opening:
            file = cast(io.FileIO, opening.enter_context(open_private(self.path, "ab", buffering=0)))
            _take_back(file, _unfinished(self.path))  # remove the partial line of a writer that died
            past_bytes = file.seek(0, os.SEEK_END)
            if not past_bytes:
                _append(file, first_line())
            opening.pop_all()
        self._file, self._past_bytes = file, past_bytes
        return file

    def write(self, event: str, *, t: float | None = None, **fields: Any) -> None:
        """Write an event of a declared kind. `t`: time of the event; None for now."""
        happened, line = checked(event, fields, t)
        if self._together is None:
            self._keep(line)
        else:
            self._together.append(line)
        for listener in self.listeners:
            listener(happened)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Collect the lines written inside the `with` block, and append these lines at the end of the block or before a
        read. Do not nest `together` blocks."""
        self._together = []
        try:
            yield
        finally:
            self._flush()
            self._together = None

    def _flush(self) -> None:
        lines, self._together = self._together, [] if self._together is not None else None
        if lines:
            self._keep(b"".join(lines), len(lines))

    def read(self, *, steps: bool = True) -> Events:
        """Return all readable events so far. Leave out events of steps if `steps` is False. Report unreadable lines on
        stderr."""
        self._flush()
        return _read(self.path, steps=steps).events

    def past(self) -> Iterator[Event]:
        """Yield the events from before this log was opened. The first `next` reads the file, in any thread."""
        yield from _read(self.path, nbytes=self._past_bytes).events

    def reporter(self, *, state: str, error: Any, world_size: int) -> Callable[[], dict[str, Any]]:
        """Return a function that makes the report of all events so far. Any thread may call the function. See
        `report_on`."""
        self._flush()
        path, nbytes, lost, notes = self.path, None, (self._lost, self._why), list[str]()
        if self._file is not None:
            nbytes = self._file.seek(0, os.SEEK_END)
            if not os.fstat(self._file.fileno()).st_nlink:
                path, notes = Path(f"/proc/self/fd/{self._file.fileno()}"), [f"{path} was removed while the job ran"]

        def make() -> dict[str, Any]:
            # read the log only when the report is made, so that no process holds a month's events while the job runs
            report = report_on(path, state=state, error=error, world_size=world_size, nbytes=nbytes, lost=lost)
            return report | {"warnings": [*notes, *report["warnings"]]}

        return make

    def _keep(self, lines: bytes, count: int = 1) -> None:
        """Write lines. If the disk is full, the events are lost and counted, but no node stops.

        The next line that can be written has the number of lost events."""
        try:
            if self._lost:
                self._append(f"{self._lost} events could not be written here: {self._why}\n".encode())
                self._lost = 0
            self._append(lines)
            self._why = ""
        except OSError as error:
            self._cannot_write(error, count)

    def _cannot_write(self, error: OSError, count: int) -> None:
        """Count lost events. Report the first of several failures in a row on stderr."""
        if not self._why:
            self._why = error.strerror or str(error)
            sys.stderr.write(f"hyperpod_ext: {self.path} cannot be written, events are lost: {self._why}\n")
        self._lost += count

    def _append(self, line: bytes) -> None:
        _append(self._file or self._open(), line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _append(file: io.FileIO, line: bytes) -> None:
    left = line
    try:
        while left:  # this loop has one iteration, unless the disk is full
            left = left[file.write(left) :]
    except OSError:
        _take_back(file, len(line) - len(left))
        raise


def _take_back(file: io.FileIO, nbytes: int) -> None:
    """Remove a partial line of `nbytes` from the end of the file, so that the next event starts on a new line."""
    if nbytes:
        file.truncate(file.seek(0, os.SEEK_END) - nbytes)


def _read(path: Path, *, nbytes: int | None = None, steps: bool = True) -> LogRead:
    """Return the readable events of a log, or no events if the disk is broken. Report a damaged log on stderr."""
    try:
        log = read_events(path, nbytes=nbytes, steps=steps)
    except OSError as error:
        log = LogRead(Events(), Problem(f"cannot be read: {error.strerror}", source=str(path)), ())
    if log.damaged is not None:
        sys.stderr.write(f"{log.damaged}\n")
    return log


def report_on(
    path: Path, *, state: str, error: Any, world_size: int, nbytes: int | None = None, lost: tuple[int, str] = (0, "")
) -> dict[str, Any]:
    """Return the report of a log, or of the log's first `nbytes` bytes.

    The report of a damaged log has no numbers, but an error with the reason. If the log only lacks events that a full
    disk refused (counted in the log or in `lost`), the report has numbers and a warning.
    """
    log = _read(path, nbytes=nbytes)
    events, count, why = log.events, log.lost[0] + lost[0], lost[1] or log.lost[1]
    if log.damaged is not None:
        events, error = Events(), error or ConfigError([log.damaged]).to_json()
    report = make_report(events, state=state, error=error, world_size=world_size)
    return report | {"warnings": [*([lost_note(str(path), count, why)] if count else []), *report["warnings"]]}


def _unfinished(path: Path) -> int:
    """Return the number of bytes after the last complete line of a file."""
    kept = 0
    with path.open("rb") as lines:
        size = lines.seek(0, os.SEEK_END)
        while kept < size:
            kept = min(size, kept + _TAIL_BYTES)
            lines.seek(size - kept)
            if (end := lines.read(_TAIL_BYTES).rfind(b"\n")) >= 0:
                return kept - end - 1
    return kept


def write_report(run_dir: Path, report: dict[str, Any], name: str = REPORT) -> None:
    """Write a report atomically. If the disk has no room for the full report, write the report without its numbers."""
    try:
        _write_last(run_dir / name, report)
    except OSError as error:
        short = make_report(Events(), state=report["state"], error=report["error"], world_size=report["world_size"])
        why = f"{run_dir / name}: the report has no numbers; the full report could not be written: {error.strerror}"
        _write_last(run_dir / name, short | {"warnings": [why, *report["warnings"]]})


def _write_last(file: Path, report: dict[str, Any]) -> None:
    write_atomically(file, json.dumps(report, indent=2) + "\n", last=True)


def report_of(node: int | str) -> str:
    """Return the file name for the report of a node that had to stop early, perhaps with an incomplete report."""
    return f"report.node{node}.json"
