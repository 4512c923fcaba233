"""Arrow files with rows of tokens, which are memory-mapped without conversion: like a token store, they consist of
contiguous tokens and offsets.

The rows must be lists of integers, without compression and nulls. The file must be in Arrow's file or stream format
(Feather, and the cache of Hugging Face's `datasets`). The library pyarrow only locates the tokens in the file; reads
use the mapping.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.runtime.data.token_store.columns import column_named, explained, load_pyarrow, open_arrow
from hyperpod_ext.runtime.data.token_store.documents import Documents
from hyperpod_ext.runtime.data.token_store.mapped import MappedFile
from hyperpod_ext.runtime.data.token_store.segment import Tokens, windows_of
from hyperpod_ext.runtime.data.token_store.sources import find_files, kind_of
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme


@dataclass(frozen=True, slots=True)
class Column:
    """Name and type of a column of an Arrow file."""

    name: str
    type: str
    converted: str = ""
    """Why the column must be converted instead of memory-mapped; empty if the column can be mapped."""


class ArrowSegment:
    """The rows of one record batch of an Arrow file."""

    def __init__(self, file: MappedFile, values: Tokens, offsets: npt.NDArray[Any]) -> None:
        self._file, self._writable = file, values
        self._tokens = values.view()
        self._tokens.flags.writeable = False
        self._rows: Tokens | None = None
        self._offsets = offsets

    @property
    def offsets(self) -> npt.NDArray[Any]:
        """Token offset of the beginning of each row, followed by the end of the last row. Also memory-mapped."""
        self._file.check()
        return self._offsets

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._tokens.dtype

    def document(self, at: int, writable: bool = False) -> Tokens:
        """Return row `at` of the record batch, as a view. See `tokens`."""
        self._file.check()
        item = self._offsets.item
        return (self._writable if writable else self._tokens)[item(at) : item(at + 1)]

    def tokens(self, begin: int, end: int, writable: bool = False) -> Tokens:
        """Return tokens `begin` to `end` of the record batch, as a view of shape [end - begin].

        Raises:
            DatasetChangedError: the file was changed.
        """
        self._file.check()
        return (self._writable if writable else self._tokens)[begin:end]

    def windows(self, begins: npt.NDArray[np.int64], length: int) -> Tokens:
        """Return the `length` tokens from each position in `begins` on, as a copy of shape [len(begins), length]."""
        self._file.check()
        rows = self._rows  # keep a reference: another thread may replace `_rows` for another `length`
        if rows is None or rows.shape[1] != length:
            self._rows = rows = windows_of(self._tokens, length)
        return rows[begins]


class ArrowStore(Documents[ArrowSegment]):
    """The rows of one column of Arrow files, by row number, as read-only arrays of shape [n].

    Other programs may overwrite these files, so each read checks that the files are unchanged.
    """

    def __init__(self, sources: str | Path | Sequence[str | Path], column: str | None = None) -> None:
        """Memory-map the files in `sources` (files, folders or patterns), in order. `column`: defaults to the only
        column that can be mapped.

        Raises:
            NotFoundError: no file exists.
            ConfigError: a file cannot be mapped, but only converted. The error's message contains the reason.
        """
        super().__init__()
        many = [sources] if isinstance(sources, str | Path) else sources
        self.paths = find_files(many)
        self.column = column or _only_column(self.paths[0])
        self._files: list[MappedFile] = []
        digest = hashlib.sha256(self.column.encode())
        for path in self.paths:
            file = _mapped(path)
            self._files.append(file)
            with explained(path):
                for found in _segments(file, self.column):
                    if not isinstance(found, ArrowSegment):
                        raise _refused(path, self.column, found)
                    self._add(found)
                    digest.update(crc64nvme(found.offsets.data.cast("B")).to_bytes(8, "little"))
            digest.update(repr(file.identity()).encode())
        if not self.segments:
            raise ConfigError([Problem("the files have no rows", source=", ".join(map(str, self.paths)))])
        if len(kinds := sorted({segment.dtype.name for segment in self.segments})) > 1:
            raise ConfigError(
                [
                    Problem(
                        f"the files have tokens of different types: {' and '.join(kinds)}",
                        source=str(self.paths[0]),
                        hint="write the tokens of all files with the same type",
                    )
                ]
            )
        self.fingerprint = digest.hexdigest()[:32]
        """Fingerprint of all rows' lengths, and of the size, first MiB and last MiB of each file."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the tokens."""
        return self.segments[0].dtype

    def check_source(self) -> None:
        """Check that the files were not changed or replaced since they were mapped.

        Raises:
            DatasetChangedError: a file was changed or replaced.
        """
        for file in self._files:
            file.check_name()

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrowStore, ([str(path) for path in self.paths], self.column)


def columns_of(path: Path) -> list[Column]:
    """Return the columns of an Arrow file. The first record batch decides whether a column can be mapped.

    Raises:
        ConfigError: the file is not an Arrow file.
    """
    file = _mapped(path)
    with explained(path):
        found = []
        for field in _schema(file):
            first = next(_segments(file, field.name), None)
            found.append(Column(field.name, str(field.type), first if isinstance(first, str) else ""))
        return found


def _mapped(path: Path) -> MappedFile:
    if kind_of(path) != "arrow":
        raise ConfigError([Problem("it is not an Arrow file", source=str(path), hint=_convert(path, ""))])
    if not path.stat().st_size:
        raise ConfigError([Problem("it is empty", source=str(path))])
    return MappedFile(path)


def _schema(file: MappedFile) -> Any:
    arrow = load_pyarrow("pyarrow", file.path)
    return open_arrow(arrow.BufferReader(arrow.py_buffer(file.map)))[0]


def _only_column(path: Path) -> str:
    columns = columns_of(path)
    able = [column.name for column in columns if not column.converted]
    if len(able) == 1:
        return able[0]
    if able:
        raise ConfigError(
            [Problem("several columns can be mapped", source=str(path), hint=f"name one: {', '.join(able)}")]
        )
    why = "; ".join(f"{column.name}: {column.converted}" for column in columns)
    raise ConfigError([Problem(f"no column can be mapped in place ({why})", source=str(path), hint=_convert(path, ""))])


def _segments(file: MappedFile, column: str) -> Iterator[ArrowSegment | str]:
    """Yield the file's record batches that have rows. If a record batch cannot be mapped, yields the reason and
    stops."""
    arrow = load_pyarrow("pyarrow", file.path)
    schema = _schema(file)
    number = schema.names.index(column_named(file.path, column, schema.names))
    kind = schema.field(number).type
    if not (arrow.types.is_list(kind) or arrow.types.is_large_list(kind)) or not arrow.types.is_integer(
        kind.value_type
    ):
        yield f"it is {kind}, not a list of whole numbers"
        return
    buffer = arrow.py_buffer(file.map)
    for batch in open_arrow(arrow.BufferReader(buffer))[1]:
        if len(batch):
            found = _segment(file, batch.column(number), buffer.address)
            yield found
            if isinstance(found, str):
                return


def _segment(file: MappedFile, rows: Any, base: int) -> ArrowSegment | str:
    if rows.null_count:
        return "it has rows that are null"
    if rows.values.null_count:
        return "it has tokens that are null"
    places, width = rows.buffers()[1], 8 if str(rows.type).startswith("large") else 4
    offsets = _view(file, places, base, np.dtype(f"<i{width}"), rows.offset, len(rows) + 1)
    numbers = np.dtype(rows.type.value_type.to_pandas_dtype()).newbyteorder("<")
    count = len(rows.values)
    values = _view(file, rows.values.buffers()[1], base, numbers, rows.values.offset, count)
    if offsets is None or values is None:
        return "it is compressed"
    if offsets[0] < 0 or offsets[-1] > count or (np.diff(offsets) < 0).any():
        wrong = "the file is damaged: list offsets are not in order"
        raise ConfigError([Problem(wrong, source=str(file.path), hint="write the file again")])
    first = offsets.item(0)
    return ArrowSegment(file, values[first : offsets.item(-1)], offsets - first if first else offsets)


def _view(
    file: MappedFile, buffer: Any, base: int, dtype: np.dtype[Any], first: int, count: int
) -> npt.NDArray[Any] | None:
    """Return `count` numbers of a pyarrow buffer as an array in the mapped file. None if the buffer is not in the
    mapped file."""
    if not count:
        return np.empty(0, dtype)
    at = buffer.address - base + first * dtype.itemsize
    if not 0 <= at <= file.status.st_size - count * dtype.itemsize:
        return None  # the buffer is not in the file, because pyarrow has decompressed it
    return np.frombuffer(file.map, dtype, count, at)


def _refused(path: Path, column: str, why: str) -> ConfigError:
    problem = Problem(
        f"column {column} cannot be mapped in place: {why}", source=str(path), hint=_convert(path, column)
    )
    return ConfigError([problem])


def _convert(path: Path, column: str) -> str:
    return (
        f"`hp-ext data build {path} --field {column or 'COLUMN'}` converts it; for rows of tokens add --tokenizer none"
    )
