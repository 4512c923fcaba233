"""The job's event log and its report, in the run directory. Another coordinator goes on where one ended."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyperpod_ext.errors import ConfigError
from hyperpod_ext.files import write_whole
from hyperpod_ext.planner.history import scan_events
from hyperpod_ext.runtime.events.report import make_report

REPORT = "report.json"
_TAIL_BYTES = 1 << 16


class EventLog:
    """Lines of events.jsonl. Each is one write at the end of the file, so that two writers cut none.

    Args:
        fresh: a new job begins; what an earlier one left is cleared.
    """

    heard: Callable[[dict[str, Any]], None] | None = None
    """Who follows what is written."""

    def __init__(self, run_dir: Path, *, fresh: bool) -> None:
        self._path = run_dir / "events.jsonl"
        if fresh:
            self._path.unlink(missing_ok=True)
        self._file = self._path.open("ab", buffering=0)
        self._take_back(_unfinished(self._path))  # whoever wrote it ended there

    def write(self, event: str, *, t: float | None = None, **fields: Any) -> None:
        """Add an event, of now or of moment `t`."""
        entry = {"t": time.monotonic() if t is None else t, "event": event, **fields}
        self._append(json.dumps(entry).encode() + b"\n")
        if self.heard is not None:
            self.heard(entry)

    def read(self) -> list[dict[str, Any]]:
        """All events so far; see `read_events`."""
        return read_events(self._path)[0]

    def report(self, *, state: str, error: Any, world_size: int) -> dict[str, Any]:
        """The job's report; see `report_on`."""
        # read once, at the end: a process should not keep a month's events while the job runs
        return report_on(self._path, state=state, error=error, world_size=world_size)

    def _append(self, line: bytes) -> None:
        left = line
        try:
            while left:  # once, unless the disk is full
                left = left[self._file.write(left) :]
        except OSError:
            self._take_back(len(line) - len(left))
            raise

    def _take_back(self, nbytes: int) -> None:
        """Of half a line: what comes next begins a line of its own."""
        if nbytes:
            self._file.truncate(self._file.seek(0, os.SEEK_END) - nbytes)

    def close(self) -> None:
        self._file.close()


def read_events(path: Path) -> tuple[list[dict[str, Any]], ConfigError | None]:
    """Whole events of a log, and the error that names file and line where one is damaged: it is said here, too.
    A last line that was cut off is left out."""
    if not path.exists():
        return [], None
    with path.open(encoding="utf-8", errors="replace") as lines:
        events, damaged, _ = scan_events(lines, str(path))
    if damaged is None:
        return events, None
    sys.stderr.write(f"{damaged}\n")
    return events, ConfigError([damaged])


def report_on(path: Path, *, state: str, error: Any, world_size: int) -> dict[str, Any]:
    """The report of a log. From a damaged one no number can be trusted: its report has none, and says why."""
    events, damaged = read_events(path)
    if damaged is not None:
        events, error = [], error or damaged.to_json()
    return make_report(events, state=state, error=error, world_size=world_size)


def _unfinished(path: Path) -> int:
    """Bytes after the last whole line."""
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
    """Write a report so that readers see all of it or none of it."""
    write_whole(run_dir / name, json.dumps(report, indent=2) + "\n")


def report_of(node: int | str) -> str:
    """Name of the report of one node that had to stop: what the job came to, others may know better."""
    return f"report.node{node}.json"
