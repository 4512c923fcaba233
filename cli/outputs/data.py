"""Models of the outputs of `hp-ext data` commands."""

from __future__ import annotations

from typing import Literal

from hyperpod_ext.jobs.job_files.job_report import Output

from .base import Defect

Read = Literal["mapped in place", "converted"]


class SourceFile(Output):
    """A file of a dataset."""

    path: str
    nbytes: int
    mtime_ns: int
    ends_crc64nvme: str
    """Checksum of the first and the last bytes of the file."""


class SkippedRecord(Output):
    """A record that could not be read."""

    file: str
    record: int
    why: str


class Document(Output):
    """One document."""

    id: int
    length: int
    tokens: list[int]
    """The first 64 tokens of the document."""


class Packed(Output):
    """Packed samples of equal length, from the documents of a store."""

    sequence_length: int
    documents: str
    samples: int
    fingerprint: str


class StoreOutput(Output):
    """A token store, or a Megatron dataset."""

    kind: Literal["store", "megatron"]
    path: str
    state: Literal["finished", "growing"]
    fingerprint: str | None
    documents: int
    tokens: int
    dtype: str
    nbytes: int
    segments: int | None = None
    tokenizer: str | None = None
    source: list[SourceFile] = []
    skipped: int = 0
    """Number of records that could not be read, and are not in the store."""
    skipped_examples: list[SkippedRecord] = []
    packed: Packed | None = None
    document: Document | None = None


class Column(Output):
    """A column of an Arrow file."""

    name: str
    type: str
    read: Read
    why: str
    """Why the column must be converted; empty if it can be memory-mapped."""


class DatasetFile(Output):
    """A file that `hp-ext data build` reads."""

    kind: str
    path: str
    nbytes: int
    read: Read
    columns: list[Column] = []
    column: str | None = None
    """Name of the column that `fingerprint`, `documents`, `tokens` and `dtype` describe."""
    fingerprint: str | None = None
    documents: int | None = None
    tokens: int | None = None
    dtype: str | None = None
    document: Document | None = None


class ListedStore(Output):
    """One token store in a folder."""

    path: str
    state: Literal["finished", "growing"]
    nbytes: int
    used_at: float
    """Time at which the store was last used, in seconds since 1970."""


class StoresOutput(Output):
    """The token stores in a folder."""

    place: str
    stores: list[ListedStore]


class VerifiedStore(Output):
    """Result for a verified token store, of which every byte was read."""

    path: str
    state: Literal["good", "damaged", "growing"]
    segments: int
    nbytes: int
    problems: list[Defect]
    source_changes: list[str]
    dropped: list[str]
    """Files that `--drop-damaged` removed."""
