"""The event log of a job that may still write it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

from hyperpod_ext.jobs.contract.run_files import Tail
from hyperpod_ext.runtime.events.event import NOTE


class GrowingLog:
    """A log whose events are asked for again and again. Each line is read once."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._opened: IO[bytes] | None = None
        """Is kept open, so that the log of a new job in the place of this one has another inode."""

    def events(self) -> list[dict[str, Any]]:
        """Events so far; of one that is being written now there may be half a line."""
        try:
            if self._opened is None or not os.path.samestat(os.fstat(self._opened.fileno()), self._file.stat()):
                self._begin()
        except FileNotFoundError:
            return []
        self._events += [event for line in self._tail.lines() if (event := event_in(line)) is not None]
        return self._events

    def _begin(self) -> None:
        self.close()
        self._opened = self._file.open("rb")
        self._tail, self._events = Tail(self._file), list[dict[str, Any]]()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def events_in(file: Path) -> list[dict[str, Any]]:
    """Events of a log so far, read once."""
    log = GrowingLog(file)
    try:
        return log.events()
    finally:
        log.close()


def event_in(line: str) -> dict[str, Any] | None:
    """The event of a line, which is as declared; None: it is the log's first line."""
    event: dict[str, Any] = json.loads(line)
    assert NOTE not in event, event[NOTE]
    return None if event["event"] == "log" else event
