"""Reads the records of a dataset in order, from any position.

The formats are JSON, JSONL and plain text (each also gzipped), Parquet, and Arrow."""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hyperpod_ext.errors import ConfigError, NotFoundError, Problem
from hyperpod_ext.runtime.data.token_store.columns import arrow_rows, parquet_rows
from hyperpod_ext.user_folders import expanded

Rows = Iterator[tuple["Position", Any]]
SPLITS = ("file", "lines", "paragraphs")
_TEXT_LIMIT = 1 << 30
_TELL_BYTES = 256 * 1024  # bytes between two progress reports, because progress bars are slow
_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".txt": "text",
    ".text": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}


@dataclass(frozen=True, slots=True)
class Position:
    """Position of the next record in the source files."""

    file: int = 0
    record: int = 0
    """Number of the record in the file, counted from 0."""
    offset: int = 0
    """Byte offset in the uncompressed file; 0 for records that have no offset (in JSON arrays, Parquet, Arrow)."""

    @classmethod
    def of(cls, known: Mapping[str, int]) -> Position:
        """Return the position that is stored in a segment's header."""
        return cls(**{name: known[name] for name in cls.__dataclass_fields__ if name in known})

    def as_dict(self) -> dict[str, int]:
        """Return the position as a dict for a segment's header."""
        # dataclasses.asdict() is too slow to call for each record
        return {"file": self.file, "record": self.record, "offset": self.offset}


def find_files(sources: Sequence[str | Path]) -> list[Path]:
    """Return the files in `sources` (files, folders, patterns), sorted within each source, for the same order on all
    nodes.

    Raises:
        NotFoundError: a source matches no file.
        ConfigError: a file has an unsupported format.
    """
    found: list[Path] = []
    for source in map(str, sources):
        path = expanded(source)
        if path.is_dir():
            inside = sorted(each for each in path.rglob("*") if each.is_file() and kind_of(each))
        elif path.exists():
            inside = [path]
        else:
            inside = sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207  # patterns may be absolute
        if not inside:
            hint = f"supported: {', '.join(_KINDS)}, text formats also as .gz" if path.is_dir() else ""
            raise NotFoundError(f"there is no dataset at {source}", hint=hint)
        found += inside
    unread = [
        Problem("has an unsupported format", source=str(path), hint=_valid()) for path in found if not kind_of(path)
    ]
    if unread:
        raise ConfigError(unread)
    return found


def kind_of(path: Path) -> str | None:
    """Return the format of a file by its name: `jsonl`, `json`, `text`, `parquet` or `arrow`; None if unsupported."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        kind = _KINDS.get(Path(path.stem).suffix.lower())
        return kind if kind in ("jsonl", "json", "text") else None
    return _KINDS.get(suffix)


def rows(
    files: Sequence[Path], start: Position, *, field: str, split: str, on_bytes: Callable[[int], None]
) -> Iterator[tuple[Position, Position, Any]]:
    """Yield records from `start` on, as (position, next position, value). `on_bytes` is called with the number of bytes
    read since its last call.

    An unreadable record is yielded as a `ValueError`, which the caller handles.

    Raises:
        ConfigError: the rest of a file cannot be read.
    """
    here = start
    for number in range(start.file, len(files)):
        if number != here.file:
            here = Position(file=number)
        done = 0
        size = files[number].stat().st_size
        for following, value, read in _of_file(files[number], here, field, split):
            if read - done >= _TELL_BYTES:
                on_bytes(min(read, size) - done)
                done = min(read, size)
            yield here, following, value
            here = following
        on_bytes(size - done)


def _of_file(path: Path, start: Position, field: str, split: str) -> Iterator[tuple[Position, Any, int]]:
    """Yield (position of the next record, value or ValueError of this record, bytes of the file read so far)."""
    kind = kind_of(path)
    if kind in ("parquet", "arrow"):
        read = parquet_rows if kind == "parquet" else arrow_rows
        for record, value, nbytes in read(path, field, start.record):
            yield Position(start.file, record + 1), value, nbytes
        return
    raw = path.open("rb")
    with raw, _opened(path, raw) as text:
        try:
            if kind == "json" and (array := _array_of(path, text)) is not None:
                for record, value in enumerate(array[start.record :], start.record):
                    yield Position(start.file, record + 1), value, 0
            elif kind == "text" and split == "file":
                if start.record == 0:
                    yield Position(start.file, 1), _decoded(_read_all(path, text)), raw.tell()
            else:
                text.seek(start.offset)
                pieces = _paragraphs(text) if kind == "text" and split == "paragraphs" else iter(text)
                yield from _lines(pieces, start, raw, parse=_json if kind != "text" else _decoded)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raw.seek(0)
            if raw.read(2) != b"\x1f\x8b":
                hint = "remove .gz from its name, or compress it"
                raise ConfigError([Problem("is not a gzip file", source=str(path), hint=hint)]) from None
            raise ConfigError([Problem(f"the gzip file is cut off or damaged ({error})", source=str(path))]) from None


def _lines(
    pieces: Iterator[bytes], start: Position, raw: IO[bytes], parse: Callable[[bytes], Any]
) -> Iterator[tuple[Position, Any, int]]:
    record, offset = start.record, start.offset
    for piece in pieces:
        record, offset = record + 1, offset + len(piece)
        if parse is _json and not piece.strip():
            continue  # blank lines are not records
        yield Position(start.file, record, offset), parse(piece), raw.tell()


def _paragraphs(text: IO[bytes]) -> Iterator[bytes]:
    """Yield the paragraphs of a text, each with the blank lines after it."""
    piece, ended = b"", False
    for line in text:
        if ended and line.strip():
            yield piece
            piece, ended = b"", False
        piece += line
        ended = not line.strip() and bool(piece.strip())
    if piece:
        yield piece


def _json(piece: bytes) -> Any:
    try:
        return json.loads(piece)
    except (ValueError, RecursionError) as error:
        return ValueError(f"not JSON: {error}")


def _decoded(piece: bytes) -> Any:
    try:
        return piece.decode()
    except UnicodeDecodeError as error:
        return ValueError(f"not UTF-8: {error}")


def _array_of(path: Path, text: IO[bytes]) -> list[Any] | None:
    """Return the records of a file with one JSON array. None if the file has one record per line instead."""
    head = text.read(4096).lstrip()
    text.seek(0)
    if not head.startswith(b"["):
        return None
    try:
        found = json.loads(_read_all(path, text))
    except (ValueError, RecursionError) as error:
        raise ConfigError([Problem(f"not JSON: {error}", source=str(path))]) from None
    assert isinstance(found, list)
    return found


def _read_all(path: Path, text: IO[bytes]) -> bytes:
    data = text.read(_TEXT_LIMIT + 1)
    if len(data) > _TEXT_LIMIT:
        hint = "write it as JSONL" if kind_of(path) == "json" else "choose --split lines or paragraphs"
        raise ConfigError(
            [Problem(f"too large to be read at once: over {_TEXT_LIMIT >> 20} MiB", source=str(path), hint=hint)]
        )
    return data


def _opened(path: Path, raw: IO[bytes]) -> IO[bytes]:
    if path.suffix.lower() == ".gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]  # like IO[bytes], but its type lacks fileno
    return raw


def _valid() -> str:
    return f"valid: {', '.join(_KINDS)}, and .jsonl.gz, .json.gz, .txt.gz; Megatron's .bin/.idx need no conversion"
