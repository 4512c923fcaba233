"""The job's event log and its report, in the run directory. Another coordinator goes on where one ended."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyperpod_ext.files import write_whole

REPORT = "report.json"


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

    def write(self, event: str, *, t: float | None = None, **fields: Any) -> None:
        """Add an event, of now or of moment `t`."""
        entry = {"t": time.monotonic() if t is None else t, "event": event, **fields}
        self._file.write(json.dumps(entry).encode() + b"\n")
        if self.heard is not None:
            self.heard(entry)

    def read(self) -> list[dict[str, Any]]:
        """All events so far."""
        # read once, at the end: a process should not keep a month's events while the job runs
        with self._path.open("rb") as lines:
            return [json.loads(line) for line in lines if line.endswith(b"\n")]

    def close(self) -> None:
        self._file.close()


def write_report(run_dir: Path, report: dict[str, Any], name: str = REPORT) -> None:
    """Write a report so that readers see all of it or none of it."""
    write_whole(run_dir / name, json.dumps(report, indent=2) + "\n")


def report_of(node: int | str) -> str:
    """Name of the report of one node that had to stop: what the job came to, others may know better."""
    return f"report.node{node}.json"
