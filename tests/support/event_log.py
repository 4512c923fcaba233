"""The event log of a job that may still write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hyperpod_ext.runtime.events.event import NOTE


def events_in(file: Path) -> list[dict[str, Any]]:
    """Events of a log so far; of one that is being written now there may be half a line."""
    if not file.exists():
        return []
    lines = file.read_text().splitlines(keepends=True)
    return [event for line in lines if line.endswith("\n") and (event := event_in(line)) is not None]


def event_in(line: str) -> dict[str, Any] | None:
    """The event of a line, which is as declared; None: it is the log's first line."""
    event: dict[str, Any] = json.loads(line)
    assert NOTE not in event, event[NOTE]
    return None if event["event"] == "log" else event
