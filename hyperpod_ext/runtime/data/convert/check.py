"""Checks all segments of a token store, and removes damaged segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperpod_ext.errors import ConflictError, CorruptSegmentError, NotFoundError, Problem
from hyperpod_ext.runtime.data.token_store.files import FileLock, read_json
from hyperpod_ext.runtime.data.token_store.identity import changes
from hyperpod_ext.runtime.data.token_store.segment import Segment, segment_name
from hyperpod_ext.runtime.data.token_store.writer import ABOUT, DONE, LOCK, digest_of


@dataclass
class Findings:
    """Result of checking all segments of a token store."""

    segments: int = 0
    nbytes: int = 0
    finished: bool = False
    problems: list[Problem] = field(default_factory=list)
    first_damaged: int | None = None
    """Index of the first damaged or missing segment; number of segments if only store.json is wrong; None if nothing is
    damaged."""
    source_changes: list[str] = field(default_factory=list)


_STORES = "`hp-ext data inspect` lists the token stores in a folder."


def nbytes_of_segments(folder: Path) -> int:
    """Return the total size in bytes of a store's existing segment files."""
    return sum(path.stat().st_size for path in folder.glob("seg-*.tokens"))


def check(folder: Path, *, on_bytes: Callable[[int], None] = lambda nbytes: None, source: bool = False) -> Findings:
    """Read all segments of a token store, compare them with their checksums, and return the findings.

    `on_bytes` receives the size of each segment after its check. With `source`, also compare the source files with the
    files that were converted, as recorded in about.json.

    Raises:
        NotFoundError: the folder has no token store.
    """
    found = Findings()
    if folder.is_file():
        raise NotFoundError(f"{folder} is a file, not a token store", hint=_STORES)
    about, done = _document(folder / ABOUT, found), _document(folder / DONE, found)
    if about is None and not found.problems:
        raise NotFoundError(f"{folder} is not a token store", hint=_STORES)
    if about is None:
        found.first_damaged = 0  # no about.json: source of segments unknown
    elif source:
        found.source_changes = changes(about["source"])
    found.finished = done is not None
    there = sorted(folder.glob("seg-*.tokens"))
    count = max(int(done["segments"]) if done else 0, len(there))
    infos = []
    for index in range(count):
        path = folder / segment_name(index)
        found.segments += 1
        try:
            segment = Segment(path)
            infos.append(segment.info)
            found.nbytes += segment.info.nbytes
            wrong = segment.damage()
        except FileNotFoundError:
            wrong = ["is missing"]
        except CorruptSegmentError as error:
            wrong = [error.message.partition(": ")[2]]
        on_bytes(path.stat().st_size if path.exists() else 0)
        if wrong and found.first_damaged is None:
            found.first_damaged = index
        found.problems += [Problem(each, source=path.name) for each in wrong]
    if done is not None and not found.problems and digest_of(infos) != done["fingerprint"]:
        found.problems.append(Problem("the fingerprint does not match the segments", source=DONE))
    if found.problems and found.first_damaged is None:
        found.first_damaged = count
    return found


def _document(path: Path, found: Findings) -> dict[str, Any] | None:
    try:
        return read_json(path)
    except CorruptSegmentError as error:
        found.problems.append(Problem(error.message.partition(": ")[2], source=path.name))
        return None


def drop_from(folder: Path, index: int) -> list[str]:
    """Remove segment `index`, all later segments, and store.json, which marks the store as finished. Return the names
    of the removed segments.

    Raises:
        ConflictError: another process is writing the store.
    """
    lock = FileLock(folder / LOCK)
    if not lock.acquire(timeout_s=0.5):
        raise ConflictError(f"{folder} is being written by another process", hint="Wait until that process has ended.")
    try:
        gone = [path for path in sorted(folder.glob("seg-*.tokens")) if path.name >= segment_name(index)]
        about = [] if index else [folder / ABOUT]
        for path in [folder / DONE, *gone, *about]:  # delete store.json first: a store without it is unfinished
            path.unlink(missing_ok=True)
        return [path.name for path in gone]
    finally:
        lock.release()
