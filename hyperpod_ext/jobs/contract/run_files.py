"""Readers of the growing files of a run: its event log, and the output of its workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hyperpod_ext.files import open_regular

_TAIL_BYTES = 16384
"""Bytes at the end of an event log that are read for the newest step."""


class Tail:
    """A growing file. Each call of `lines` returns the complete lines added since the previous call."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0

    def lines(self) -> list[str]:
        try:
            with open_regular(self._file) as opened:
                opened.seek(self._offset)
                grown = opened.read()
        except FileNotFoundError:
            return []  # the file does not exist yet
        complete = grown[: grown.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.decode(errors="replace").splitlines()


class LogReader:
    """The merged logs of one run, each line prefixed with `rank 2 | ` or `node 0 | `."""

    def __init__(self, run_dir: Path, rank: int | None = None) -> None:
        self._folder = run_dir / "logs"
        self._rank = rank
        self._tails: dict[str, Tail] = {}

    def lines(self) -> list[str]:
        for file in self._folder.glob("*.log") if self._rank is None else [self._folder / f"rank{self._rank}.log"]:
            self._tails.setdefault(file.stem, Tail(file))
        return [
            f"{stem[:4]} {stem[4:]} | {line}"
            for stem, tail in sorted(self._tails.items(), key=lambda item: _place(item[0]))
            for line in tail.lines()
        ]


def _place(stem: str) -> tuple[str, int]:
    return stem[:4], int(stem[4:]) if stem[4:].isdecimal() else 0


def read_event(line: bytes | str) -> dict[str, Any]:
    """Parse a line of the event log; {} if it is not an event. Followers skip such lines; only the report lists
    them."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):  # a window or a full disk may cut a line
        return {}
    return event if isinstance(event, dict) else {}


def last_step(events: Path) -> dict[str, Any]:
    """Return the newest event with progress of an event log; {} if there is none."""
    try:
        with open_regular(events) as opened:
            size, nbytes = opened.seek(0, 2), _TAIL_BYTES
            while True:  # after a fault of many ranks, the end of the log may have no step
                opened.seek(max(size - nbytes, 0))
                lines = opened.read(min(size, nbytes)).split(b"\n")
                found = (read_event(line) for line in reversed(lines[:-1]) if b'"step"' in line)
                event = next((one for one in found if has_progress(one)), {})
                if event or nbytes >= size:
                    return event
                nbytes *= 8
    except FileNotFoundError:
        return {}


def has_progress(event: dict[str, Any]) -> bool:
    """Return whether an event has the job's progress: a completed step, or the step that a rank continues from."""
    match event:
        case {"event": "step" | "begun", "step": int()}:
            return isinstance(event.get("of"), int | None)
    return False
