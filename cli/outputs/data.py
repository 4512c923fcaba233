"""Outputs of commands on datasets."""

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
    """Checksum of the file's first and last bytes."""


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
    """The first 64 tokens."""


class Packed(Output):
    """Samples of equal length."""

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
    """Records that could not be read."""
    skipped_examples: list[SkippedRecord] = []
    packed: Packed | None = None
    document: Document | None = None


class Column(Output):
    """A column of an Arrow file."""

    name: str
    type: str
    read: Read
    why: str
    """Why the column must be converted."""


class DatasetFile(Output):
    """A file that `hp-ext data build` reads."""

    kind: str
    path: str
    nbytes: int
    read: Read
    columns: list[Column] = []
    column: str | None = None
    """Column that the following counts describe."""
    fingerprint: str | None = None
    documents: int | None = None
    tokens: int | None = None
    dtype: str | None = None
    document: Document | None = None


class ListedStore(Output):
    """One store of a folder."""

    path: str
    state: Literal["finished", "growing"]
    nbytes: int
    used_at: float
    """Seconds since 1970."""


class StoresOutput(Output):
    """Stores of a folder."""

    place: str
    stores: list[ListedStore]


class VerifiedStore(Output):
    """A store of which every byte was read."""

    path: str
    state: Literal["good", "damaged", "growing"]
    segments: int
    nbytes: int
    problems: list[Defect]
    source_changes: list[str]
    dropped: list[str]
    """Files that `--drop-damaged` removed."""
