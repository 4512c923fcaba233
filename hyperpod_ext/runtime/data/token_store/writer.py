"""Writes a token store. `flock` excludes other writers, and files are published atomically by renaming.

    FOLDER/about.json            source and options of the store; its hash is the store's key
           lock, readers         files locked by the writer, and by readers
           seg-000000.tokens     ...
           store.json            written last; without it the store is still growing

The writer may be killed at any moment. The next writer continues after the newest published segment.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hyperpod_ext.errors import ConflictError, CorruptSegmentError, HyperpodExtError
from hyperpod_ext.runtime.data.token_store.files import FileLock, make_folder, publish_json, read_json, sweep
from hyperpod_ext.runtime.data.token_store.identity import content_of
from hyperpod_ext.runtime.data.token_store.segment import SegmentInfo, Tokens, read_info, segment_name, write_segment

MIB = 1 << 20
SEGMENT_BYTES = 128 * MIB
_TIMEOUT_S = 0.5  # time limit for the lock, which a reader holds for a moment to check for a writer
ABOUT, DONE, LOCK, READERS = "about.json", "store.json", "lock", "readers"


def key_of(about: Mapping[str, Any]) -> str:
    """Return the key of a token store with the given contents of about.json. Equal keys mean equal tokens. The key does
    not depend on the folder of the source files."""
    content = {**about, "source": content_of(about["source"])}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def digest_of(segments: Sequence[SegmentInfo]) -> str:
    """Return the fingerprint of all tokens, which does not depend on when and where the store was built."""
    content = [[each.dtype, each.documents, each.tokens, each.crc64nvme] for each in segments]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def smallest_dtype(largest: int) -> np.dtype[Any]:
    """Return the smallest unsigned integer type for tokens up to `largest`."""
    for name in ("uint8", "uint16", "uint32", "uint64"):
        if largest <= np.iinfo(name).max:
            return np.dtype(name)
    raise HyperpodExtError(f"token {largest} is too large", hint="Tokens are numbers from 0 to 2**64 - 1.")


def published(folder: Path) -> list[SegmentInfo]:
    """Return the headers of the published segments, from segment 0 up to the first missing segment.

    Raises:
        CorruptSegmentError: a segment is damaged.
    """
    found: list[SegmentInfo] = []
    while True:
        try:
            found.append(read_info(folder / segment_name(len(found))))
        except FileNotFoundError:
            return found


class StoreWriter:
    """Appends documents to a token store, and publishes each segment when it is full."""

    def __init__(
        self,
        folder: Path,
        about: Mapping[str, Any],
        *,
        vocab_size: int | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        lock: FileLock | None = None,
        before_publish: Callable[[], None] = lambda: None,
    ) -> None:
        """Open a new or unfinished token store.

        `lock`: the store's lock, if the caller already holds it. `before_publish` is called before each segment is
        published, and may raise an error.

        Raises:
            ConflictError: another writer has the lock.
            CorruptSegmentError: published files are damaged.
        """
        make_folder(folder)
        self.folder, self.key = folder, key_of(about)
        self._lock = lock or FileLock(folder / LOCK)
        if not self._lock.held and not self._lock.acquire(timeout_s=_TIMEOUT_S):
            raise ConflictError(
                f"{folder} is being written by another process",
                hint="Open the store to read it while it grows, or wait until that process has ended; "
                "if the process dies, the lock is free at once.",
            )
        try:
            sweep(folder)
            if read_json(folder / ABOUT) is None:
                publish_json(folder / ABOUT, dict(about))
            (folder / READERS).touch()
            self.segments = published(folder)
            if any(info.store != self.key for info in self.segments):
                raise CorruptSegmentError(f"{folder} holds segments of another store", hint="choose another place")
        except BaseException:
            self._lock.release()
            raise
        self._segment_bytes, self._before_publish = segment_bytes, before_publish
        self._declared = None if vocab_size is None else smallest_dtype(vocab_size - 1)
        self._tokens: Tokens = np.empty(0)
        self._count = 0
        self._offsets = array("Q")
        self._following: Mapping[str, int] = {}
        self._start()

    @property
    def finished(self) -> bool:
        """Whether the store is complete."""
        return (self.folder / DONE).exists()

    @property
    def position(self) -> Mapping[str, int]:
        """Position in the source files after the last published document. Empty if no segment is published."""
        return self.segments[-1].next if self.segments else {}

    @property
    def documents(self) -> int:
        """Number of documents in the store, including documents that are not published yet."""
        return sum(info.documents for info in self.segments) + len(self._offsets) - 1

    def append(self, tokens: Tokens, following: Mapping[str, int]) -> SegmentInfo | None:
        """Add a document, given as integers of shape [n]. `following`: position in the source files after the document.

        Returns the header of the segment if this call has published a segment, otherwise None.

        Raises:
            HyperpodExtError: `tokens` are invalid.
            DiskFullError: the disk has no space left. Published segments stay.
        """
        largest = _largest(tokens, self.documents)
        if self._declared is not None and largest > np.iinfo(self._declared).max:
            raise HyperpodExtError(
                f"document {self.documents}: token {largest} is beyond the vocabulary that the tokenizer declares",
                hint="Give the tokenizer its true vocab_size. If the records are token ids, use the tokenizer `none`.",
            )
        done = None
        if self._count and (self._count + len(tokens)) * self._tokens.itemsize > self._segment_bytes:
            done = self.publish()
        if largest > np.iinfo(self._tokens.dtype).max:
            self._tokens = self._tokens.astype(smallest_dtype(largest))
        if (need := self._count + len(tokens)) > len(self._tokens):
            room = np.empty(max(need, 2 * len(self._tokens)), self._tokens.dtype)
            room[: self._count] = self._tokens[: self._count]
            self._tokens = room
        self._tokens[self._count : need] = tokens
        self._count = need
        self._offsets.append(need)
        self._following = following
        return done

    def publish(self) -> SegmentInfo | None:
        """Publish the documents that were appended since the last segment, if any. Returns the new segment's header."""
        if len(self._offsets) == 1:
            return None
        self._before_publish()
        info = write_segment(
            self.folder,
            len(self.segments),
            self._tokens[: self._count],
            np.frombuffer(self._offsets, dtype=np.uint64),
            store=self.key,
            following=self._following,
        )
        self.segments.append(info)
        self._start()
        return info

    def finish(self, more: Mapping[str, Any]) -> None:
        """Publish the remaining documents, and mark the store as finished by writing store.json. `more`: further
        entries for store.json."""
        self.publish()
        self._before_publish()
        known = {
            "format": 1,
            "key": self.key,
            "fingerprint": digest_of(self.segments),
            "segments": len(self.segments),
            "documents": sum(info.documents for info in self.segments),
            "tokens": sum(info.tokens for info in self.segments),
            "nbytes": sum(info.nbytes for info in self.segments),
        }
        publish_json(self.folder / DONE, {**known, **more})

    def close(self) -> None:
        """Release the store's lock. Drops documents that are not published yet."""
        self._lock.release()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._tokens = np.empty(1024, self._declared or np.dtype("uint8"))
        self._count = 0
        self._offsets = array("Q", [0])
        self._following = {}


def _largest(tokens: Tokens, document: int) -> int:
    if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
        raise HyperpodExtError(
            f"document {document}: tokens must be integers of shape [n], not {tokens.dtype.name} {tokens.shape}"
        )
    if not len(tokens):
        return 0
    if tokens.dtype.kind == "i" and (least := int(tokens.min())) < 0:
        hint = "Tokens are numbers from 0 on. Remove numbers that mark padding or errors from the records."
        raise HyperpodExtError(f"document {document}: token {least} is negative", hint=hint)
    return int(tokens.max())
