"""Stores a job's events in the durable tier next to its checkpoints, where they outlive the nodes.

Each node writes its own files, called parts:

    NAME-OF-THE-JOB/events/1764038400000-00002-000001.jsonl      start time of the writer, node, number of the part

A part is a log with a first line of its own, which records the clock of its machine. A writer adds lines to its newest
part by replacing the whole part. So a reader sees either the old or the new content of a part, never a mixture.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from hyperpod_ext.errors import CorruptSnapshotError, HyperpodExtError, NotFoundError, UnreachableError
from hyperpod_ext.runtime.events.event import VERSION, Event, Events
from hyperpod_ext.runtime.events.of_training import Step
from hyperpod_ext.runtime.events.reading import LogRead, is_moment, parse_line, read_log
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme, crc_text
from hyperpod_ext.runtime.storage.object_store import Cancelled, Entry, ObjectStore

EVERY_S = 10.0
"""Minimum time between two uploads, in seconds. Events of the kinds in `AT_ONCE` are uploaded earlier."""
AT_ONCE = frozenset({"fault", "go", "done", "job_ended"})
_LOOK_S = 0.5
_READ_BYTES = 4 << 20
"""Number of bytes to read from the log at a time."""
_CLOSE_S = 60.0
_FOLDER = "events/"
_PART = re.compile(r"events/[0-9]+-[0-9]+-[0-9]+\.jsonl")
_PART_BYTES = 1 << 20
_MOST_WAITING = 4 << 20
_LARGEST_PART = 16 << 20
_PUT_S = 30.0
_GETS_AT_ONCE = 8


class KeptLog:
    """Writes one node's parts of the event log to the store in the durable tier."""

    def __init__(self, store: ObjectStore, node: int) -> None:
        self._store = store
        self._epoch = time.time() - time.monotonic()
        self._name = f"{_FOLDER}{int(time.time() * 1000):013d}-{node:05d}"
        self._number, self._part, self._written = 1, bytearray(), 0

    def add(self, lines: Iterable[bytes]) -> None:
        """Add lines. The next `flush` writes the lines to the store."""
        for line in lines:
            self._part += line

    @property
    def full(self) -> bool:
        """Whether so many bytes wait to be written that no more lines should be added."""
        return len(self._part) - self._written > _MOST_WAITING

    def flush(self) -> None:
        """Write the added lines to the store, by replacing the newest part.

        Raises:
            HyperpodExtError: the store is unreachable or full. The lines are kept for the next `flush`.
        """
        if self._written == len(self._part):
            return
        head = {"t": time.monotonic(), "event": "log", "version": VERSION, "epoch": self._epoch}
        data = json.dumps(head).encode() + b"\n" + self._part
        name, until = f"{self._name}-{self._number:06d}.jsonl", time.monotonic() + _PUT_S
        try:
            checksum = crc_text(crc64nvme(data))
            self._store.put(name, memoryview(data), checksum, cancelled=lambda: time.monotonic() > until)
        except Cancelled:
            raise UnreachableError(f"{name} was not uploaded to {self._store.url} within {_PUT_S:g} s") from None
        self._written = len(self._part)
        if self._written >= _PART_BYTES:
            self._number, self._part, self._written = self._number + 1, bytearray(), 0


class LogUpload:
    """Uploads the event log that this process writes to the durable tier, in a background thread.

    An unreachable store does not block this process.

    Args:
        log: the events.jsonl to upload, from its beginning. Readers skip lines that were uploaded before.
        open_place: returns the job's store in the durable tier. The background thread calls this function.
        node: number of this node.
    """

    def __init__(self, log: Path, open_place: Callable[[], ObjectStore], node: int) -> None:
        self._log, self._open_place, self._node = log, open_place, node
        self._kept: KeptLog | None = None
        self._offset, self._next, self._urgent = 0, 0.0, False
        self._failed = ""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="upload of the event log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Upload the rest of the log, for at most `_CLOSE_S` seconds."""
        self._ending.set()
        self._thread.join(_CLOSE_S)

    def _work(self) -> None:
        while True:
            last = self._ending.wait(_LOOK_S)
            try:
                if self._kept is None:
                    self._kept = KeptLog(self._open_place(), self._node)
                more = self._take(self._kept)
                if last or self._urgent or time.monotonic() >= self._next:
                    self._next = time.monotonic() + EVERY_S
                    self._kept.flush()
                    self._urgent, self._failed = False, ""
            except (HyperpodExtError, OSError) as error:
                more = False
                self._say(str(error))
            if last and not more:
                return

    def _take(self, kept: KeptLog) -> bool:
        """Read the log's new complete lines into `kept`. Returns whether the log may have more new lines."""
        if kept.full or not self._log.exists():
            return False  # if the store is unreachable, unread lines stay in the log
        with self._log.open("rb") as log:
            log.seek(self._offset)
            grown = log.read(_READ_BYTES)
        complete = grown[: grown.rfind(b"\n") + 1]
        self._offset += len(complete)
        lines = complete.splitlines(keepends=True)
        entries = [parse_line(line) for line in lines]
        self._urgent |= any(entry is not None and entry["event"] in AT_ONCE for entry in entries)
        kept.add(lines)
        return len(grown) == _READ_BYTES and bool(complete)

    def _say(self, why: str) -> None:
        if why != self._failed:
            self._failed = why
            sys.stderr.write(f"the job's events are not kept: {why}\n")


def read_kept(store: ObjectStore) -> LogRead:
    """Return the events of all nodes in order of time, with Unix times in seconds.

    Raises:
        NotFoundError: the store has no events of the job.
    """
    entries = _parts(store)
    if not entries:
        raise NotFoundError(f"there are no events at {store.url}")
    read = [*_read(store, entries, set())]
    events = Events(sorted((event for one in read for event in one.events), key=lambda event: event.t))
    damaged = next((one.damaged for one in read if one.damaged is not None), None)
    return LogRead(events, damaged, tuple(note for one in read for note in one.notes))


class KeptReader:
    """Reads a running job's events from the durable tier. Each call of `new` returns only new events."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._sizes: dict[str, int] = {}
        self._seen: set[str] = set()

    def new(self) -> list[Event]:
        """Return the new readable events in order of time. A later call may return earlier events of another node."""
        grown = [entry for entry in _parts(self._store) if self._sizes.get(entry.name) != entry.nbytes]
        read = [*_read(self._store, grown, self._seen)]
        self._sizes |= {entry.name: entry.nbytes for entry in grown}
        return sorted((event for one in read for event in one.events), key=lambda event: event.t)


def _parts(store: ObjectStore) -> list[Entry]:
    return [entry for entry in store.list(_FOLDER) if _PART.fullmatch(entry.name)]


def _read(store: ObjectStore, entries: Sequence[Entry], seen: set[str]) -> Iterator[LogRead]:
    """Yield the events of each part. A part larger than `_LARGEST_PART` is left out, and named in a note."""

    def get(entry: Entry) -> bytes | None:
        try:
            return store.get(entry.name, _LARGEST_PART)
        except CorruptSnapshotError:
            return None

    with ThreadPoolExecutor(_GETS_AT_ONCE) as pool:
        for first in range(0, len(entries), _GETS_AT_ONCE):  # read parts in groups, to limit their number in memory
            some = entries[first : first + _GETS_AT_ONCE]
            for entry, part in zip(some, pool.map(get, some), strict=True):
                source = f"{store.url}/{entry.name}"
                if part is not None:
                    yield _read_part(part, source, seen)
                else:
                    yield LogRead(Events(), None, (f"{source}: it is not a part of an event log; it was left out",))


def _read_part(part: bytes, source: str, seen: set[str]) -> LogRead:
    """Read one part, leaving out lines in `seen`: a restarted writer uploads some lines twice."""
    lines = part.decode(errors="replace").splitlines()
    first = parse_line(lines[0]) if lines else None
    epoch = first.get("epoch") if first is not None else None
    read = read_log(_new(lines, seen), source)
    if not (isinstance(epoch, int | float) and is_moment(epoch)):
        return read
    return replace(read, events=Events(moved(event, epoch) for event in read.events))


def _new(lines: Sequence[str], seen: set[str]) -> Iterable[str]:
    for line in lines:
        yield "" if line in seen else line
        seen.add(line)


def moved(event: Event, seconds: float) -> Event:
    """Return a copy of the event whose times are later by `seconds`."""
    began = {"began": event.began + seconds} if isinstance(event, Step) else {}
    return event.model_copy(update={"t": event.t + seconds, **began})
