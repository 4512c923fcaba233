"""Readers of the growing files of a run: its event log, and the output of its workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hyperpod_ext.files import open_regular

_TAIL_BYTES = 16384
"""Number of bytes at the end of an event log that are read first to find the newest step."""


class Tail:
    """Reader of a growing file. Each call of `lines` returns the complete lines added since the previous call."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0

    def lines(self) -> list[str]:
        try:
            with open_regular(self._file) as opened:
                opened.seek(self._offset)
                grown = opened.read()
        except FileNotFoundError:
            return []  # no lines, because the file does not exist yet
        complete = grown[: grown.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.decode(errors="replace").splitlines()


class LogReader:
    """The merged log files of one run. Each line begins with its rank or node, such as `rank 2 | ` or `node 0 | `."""

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
    """Parse a line of the event log; return {} if the line is not an event.

    `hp-ext logs` and other followers skip lines that are not events; only the job's report lists such lines.
    """
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):  # the line is incomplete: its start was not read, or the disk was full
        return {}
    return event if isinstance(event, dict) else {}


def last_step(events: Path) -> dict[str, Any]:
    """Return the newest event of the log `events` that has the job's progress; {} if no event has."""
    try:
        with open_regular(events) as opened:
            size, nbytes = opened.seek(0, 2), _TAIL_BYTES
            while True:  # read more if the last lines have no step, but only faults of many ranks
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
    """Return whether an event has the job's progress: a completed step, or the step from which a rank continues."""
    match event:
        case {"event": "step" | "begun", "step": int()}:
            return isinstance(event.get("of"), int | None)
    return False
