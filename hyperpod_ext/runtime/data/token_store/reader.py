"""Reads the documents of a token store by number, without locking and without copying.

While a token store is still being written, its published part can be read. The numbers of published documents never
change, even while more documents are written.
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
"""Number of seconds in which another writer must take over after a writer has died."""


class TokenStore(Documents[Segment]):
    """Documents of a token store by number, `store[i]`, as read-only arrays of shape [n].

    Only the path of a store is pickled, and worker processes open the store again.
    """

    def __init__(self, folder: str | Path, *, segments: int | None = None) -> None:
        """Open a token store. `segments`: number of segments to use, as in `prefix`; None for all.

        Raises:
            NotFoundError: the folder has no store.
            CorruptSegmentError: the store is damaged.
        """
        super().__init__()
        self.folder = Path(folder)
        about = read_json(self.folder / ABOUT)
        if about is None:
            raise NotFoundError(
                f"{self.folder} is not a token store",
                hint="`hp-ext data build` makes a store; `hp-ext data inspect` lists stores.",
            )
        self.about: Mapping[str, Any] = about
        self._readers = FileLock(self.folder / READERS)
        if not self._readers.acquire(shared=True):
            raise NotFoundError(
                f"another process is deleting {self.folder} to free space", hint="`hp-ext data build` builds it again."
            )
        with suppress(OSError):  # the folder of the store may be read-only
            os.utime(self.folder / READERS)  # time of last use, for eviction
        self._limit = segments
        self.done: Mapping[str, Any] | None = None
        """Contents of store.json; None while the store is still growing."""
        self.refresh()

    def refresh(self) -> int:
        """Map the segments that were published since the last call. Returns the number of documents."""
        if self.done is None:
            self.done = read_json(self.folder / DONE)  # read store.json first: the segments that it counts then exist
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
        """Whether the store's length is known, because it is complete or was opened as a `prefix`."""
        return self.done is not None or self._limit is not None

    @property
    def available(self) -> int:
        """Number of documents that can be read now."""
        return self._documents[-1]

    @property
    def key(self) -> str:
        """Key of the store's source files and options, which is known before the conversion ends."""
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
        """Yield documents in order from `number` on. In a growing store, waits until each document is published."""
        while True:
            while number < self.available:
                yield self[number]
                number += 1
            if self.finished:
                return
            self.wait(documents=number + 1)

    def prefix(self, segments: int | None = None) -> TokenStore:
        """Return the first `segments` published segments (None: all) as a store of known length.

        Training can start with the returned part while the rest of the store is written.

        Raises:
            UnknownLengthError: no segment is published yet.
        """
        self.refresh()
        count = len(self.segments) if segments is None else segments
        if not 0 < count <= len(self.segments):
            raise self._unknown(f"segment {count - 1}" if count else "segment")
        return TokenStore(self.folder, segments=count)

    def wait(self, *, documents: int | None = None, timeout_s: float | None = None) -> int:
        """Wait until `documents` documents are available or the store is finished. Returns the number of available
        documents.

        Raises:
            UnknownLengthError: the writer has ended, and no other writer has taken over.
            WaitTimeoutError: `timeout_s` has passed.
        """
        now = written_at = time.monotonic()
        deadline = None if timeout_s is None else now + timeout_s
        while True:
            now = time.monotonic()
            if self._is_written():  # look for a writer before reading files: a writer publishes files and then ends
                written_at = now
            if self.refresh() >= (documents or float("inf")) or self.finished:
                return self.available
            if now - written_at > _TAKEOVER_S:
                raise UnknownLengthError(
                    f"{self.folder} is not complete, and no process is writing it; {self._so_far()} can be read",
                    hint="Run `hp-ext data build` again with the same arguments: it writes only the missing documents.",
                )
            if deadline is not None and now > deadline:
                raise WaitTimeoutError(f"{self.folder} is still being written; {self._so_far()} can be read")
            time.sleep(_POLL_S)

    def check_source(self) -> None:
        """Check that the source files have not changed since they were converted.

        Raises:
            DatasetChangedError: a file was changed or is missing.
        """
        from hyperpod_ext.runtime.data.token_store.identity import changes

        if found := changes(self.about["source"]):
            raise DatasetChangedError(
                f"{self.folder}: the dataset has changed since it was converted: {'; '.join(found)}",
                hint="`hp-ext data build` converts it into a new store; the run's data position "
                "belongs to the old store.",
            )

    def close(self) -> None:
        """Release the lock that protects the store from eviction. Arrays that were read from the store stay valid."""
        self._readers.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (str(self.folder), self._limit)

    def _reached(self, number: int) -> int:
        if number >= self._documents[-1] and not self.finished:
            self.wait(documents=number + 1)
            if number < self._documents[-1]:
                return number
        if not self.finished:  # negative numbers need the final number of documents
            raise IndexError(f"document {number} of {self._documents[-1]}")
        return super()._reached(number)

    def _check_complete(self) -> None:
        if self.done is None or self._limit is not None:
            return
        want = int(self.done["segments"])
        if len(self.segments) < want:
            missing = self.folder / segment_name(len(self.segments))
            raise CorruptSegmentError(
                f"{missing} is missing; the store has {want} segments", hint=rebuild_hint(self.folder)
            )
        if (found := digest_of([segment.info for segment in self.segments[:want]])) != self.done["fingerprint"]:
            raise CorruptSegmentError(
                f"{self.folder}: its segments have fingerprint {found}, but {DONE} lists {self.done['fingerprint']}",
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
            f"{self.folder} has no {what} yet, because it is still being written; {self._so_far()} can be read",
            hint="Wait (`store.wait()`), start with the published part (`store.prefix()`), or read in order.",
        )


def _open(folder: str, segments: int | None) -> TokenStore:
    return TokenStore(folder, segments=segments)
