"""Reads a token store: documents by number, without a lock and without a copy.

The published part of a growing store can be read. Document numbers never change; only the number of documents is not
known yet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hyperpod_ext.errors import (
    CorruptSegmentError,
    DatasetChangedError,
    NotFoundError,
    UnknownLengthError,
    WaitTimeoutError,
)
from hyperpod_ext.runtime.data.token_store.documents import Documents
from hyperpod_ext.runtime.data.token_store.files import FileLock, read_json, rebuild_hint
from hyperpod_ext.runtime.data.token_store.segment import Segment, Tokens, segment_name
from hyperpod_ext.runtime.data.token_store.writer import ABOUT, DONE, LOCK, READERS, digest_of, key_of

_POLL_S = 0.05
_TAKEOVER_S = 1.0
"""Seconds within which another writer must replace a dead writer."""


class TokenStore(Documents[Segment]):
    """Documents of a store by number, `store[i]`, as read-only arrays of shape [n].

    A store is pickled by its path, and opened again in worker processes.
    """

    def __init__(self, folder: str | Path, *, segments: int | None = None) -> None:
        """Open a store. `segments`: use only this many segments, as in `prefix`.

        Raises:
            NotFoundError: the folder has no store.
            CorruptSegmentError: the store is damaged.
        """
        super().__init__()
        self.folder = Path(folder)
        about = read_json(self.folder / ABOUT)
        if about is None:
            raise NotFoundError(
                f"{self.folder} is no token store",
                hint="`hp-ext data build` makes one; `hp-ext data inspect` lists them.",
            )
        self.about: Mapping[str, Any] = about
        self._readers = FileLock(self.folder / READERS)
        if not self._readers.acquire(shared=True):
            raise NotFoundError(f"{self.folder} is being evicted", hint="`hp-ext data build` makes it again.")
        with suppress(OSError):  # the folder may be read-only
            os.utime(self.folder / READERS)  # the file's time is that of the last use, for eviction
        self._limit = segments
        self.done: Mapping[str, Any] | None = None
        """Contents of store.json; None while the store is still growing."""
        self.refresh()

    def refresh(self) -> int:
        """Map newly published segments. Returns the number of documents."""
        if self.done is None:
            self.done = read_json(self.folder / DONE)  # read it before the segments, so that all counted segments exist
            while self._limit is None or len(self.segments) < self._limit:
                try:
                    segment = Segment(self.folder / segment_name(len(self.segments)))
                except FileNotFoundError:
                    break
                self._add(segment)
            self._check_complete()
        return self._documents[-1]

    @property
    def finished(self) -> bool:
        """Whether the store is complete, so that its length is known."""
        return self.done is not None or self._limit is not None

    @property
    def available(self) -> int:
        """Number of documents that can be read now."""
        return self._documents[-1]

    @property
    def key(self) -> str:
        """Identity of the store's source and options, known from the beginning."""
        return key_of(self.about)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the tokens, the same on every node and after every restart.

        Raises:
            UnknownLengthError: the store is still growing.
        """
        if not self.finished:
            raise self._unknown("fingerprint")
        return digest_of([segment.info for segment in self.segments])

    def __len__(self) -> int:
        if not self.finished:
            raise self._unknown("length")
        return self._documents[-1]

    def __iter__(self) -> Iterator[Tokens]:
        return self.documents_from(0)

    def documents_from(self, number: int) -> Iterator[Tokens]:
        """Yield documents in order from `number` on. In a growing store, yields each document when it is published."""
        while True:
            while number < self.available:
                yield self[number]
                number += 1
            if self.finished:
                return
            self.wait(documents=number + 1)

    def prefix(self, segments: int | None = None) -> TokenStore:
        """Return the published part as a store of known length, so that training can start while the rest is written.

        Raises:
            UnknownLengthError: no segment is published yet.
        """
        self.refresh()
        count = len(self.segments) if segments is None else segments
        if not 0 < count <= len(self.segments):
            raise self._unknown(f"segment {count - 1}" if count else "segment")
        return TokenStore(self.folder, segments=count)

    def wait(self, *, documents: int | None = None, timeout_s: float | None = None) -> int:
        """Wait until this many documents are available or the store is finished. Returns the number of available
        documents.

        Raises:
            UnknownLengthError: the writer has ended, and no other writer continues.
            WaitTimeoutError: `timeout_s` has passed.
        """
        now = written_at = time.monotonic()
        deadline = None if timeout_s is None else now + timeout_s
        while True:
            now = time.monotonic()
            if self._is_written():  # check before reading the files, because a writer publishes before it ends
                written_at = now
            if self.refresh() >= (documents or float("inf")) or self.finished:
                return self.available
            if now - written_at > _TAKEOVER_S:
                raise UnknownLengthError(
                    f"{self.folder}: nobody writes it any more, and it is not finished; {self._so_far()} can be read",
                    hint="Start `hp-ext data build` again, as it was: it goes on after them.",
                )
            if deadline is not None and now > deadline:
                raise WaitTimeoutError(f"{self.folder} is still being written; {self._so_far()} can be read")
            time.sleep(_POLL_S)

    def check_source(self) -> None:
        """Compare the present source files with those that were converted.

        Raises:
            DatasetChangedError: a file was changed or is missing.
        """
        from hyperpod_ext.runtime.data.token_store.identity import changes

        if found := changes(self.about["source"]):
            raise DatasetChangedError(
                f"{self.folder}: the dataset has changed since it was converted: {'; '.join(found)}",
                hint="`hp-ext data build` converts it anew, into a store of its own; the run's data position "
                "belongs to the old one.",
            )

    def close(self) -> None:
        """Release the store. Arrays from the store stay valid."""
        self._readers.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (str(self.folder), self._limit)

    def _reached(self, number: int) -> int:
        if number >= self._documents[-1] and not self.finished:
            self.wait(documents=number + 1)
            if number < self._documents[-1]:
                return number
        if not self.finished:  # without a known end, negative numbers cannot be resolved
            raise IndexError(f"document {number} of {self._documents[-1]}")
        return super()._reached(number)

    def _check_complete(self) -> None:
        if self.done is None or self._limit is not None:
            return
        want = int(self.done["segments"])
        if len(self.segments) < want:
            missing = self.folder / segment_name(len(self.segments))
            raise CorruptSegmentError(f"{missing} is missing, of {want} segments", hint=rebuild_hint(self.folder))
        if (found := digest_of([segment.info for segment in self.segments[:want]])) != self.done["fingerprint"]:
            raise CorruptSegmentError(
                f"{self.folder}: its segments are those of {found}, {DONE} says {self.done['fingerprint']}",
                hint=rebuild_hint(self.folder),
            )

    def _is_written(self) -> bool:
        lock = FileLock(self.folder / LOCK)
        if not lock.acquire(shared=True):
            return True
        lock.release()
        return False

    def _so_far(self) -> str:
        return f"{self.available:,} documents in {len(self.segments)} segments"

    def _unknown(self, what: str) -> UnknownLengthError:
        return UnknownLengthError(
            f"{self.folder} has no {what} yet, it is still being written; {self._so_far()} can be read",
            hint="Wait for it (`store.wait()`), start on what is there (`store.prefix()`), or read it in order.",
        )


def _open(folder: str, segments: int | None) -> TokenStore:
    return TokenStore(folder, segments=segments)
