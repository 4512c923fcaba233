"""The event log of a job that may still write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def events_in(file: Path) -> list[dict[str, Any]]:
    """Events of a log so far; of one that is being written now there may be half a line."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
