"""Reads rows of Parquet and Arrow files. Needs pyarrow, which other modules import only through this module."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyperpod_ext.errors import ConfigError, HyperpodExtError, Problem

_BATCH_ROWS = 1024


def parquet_rows(path: Path, column: str, start: int) -> Iterator[tuple[int, Any, int]]:
    """Yield (row number, value, approximate bytes read) from row `start` on. Row groups before `start` are skipped."""
    parquet = load_pyarrow("pyarrow.parquet", path)
    with explained(path), parquet.ParquetFile(path) as file:
        name = column_named(path, column, file.schema_arrow.names)
        first = 0
        groups: list[int] = []
        for number in range(file.num_row_groups):
            count = file.metadata.row_group(number).num_rows
            if not groups and first + count <= start:
                first += count
            else:
                groups.append(number)
        total, size = max(file.metadata.num_rows, 1), path.stat().st_size
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=[name]):
            yield from _values(batch.column(0), first, start, total, size)
            first += len(batch)


def arrow_rows(path: Path, column: str, start: int) -> Iterator[tuple[int, Any, int]]:
    """Yield (row number, value, approximate bytes read) of an Arrow file or stream, which is memory-mapped."""
    arrow = load_pyarrow("pyarrow", path)
    size = path.stat().st_size
    with explained(path), arrow.memory_map(str(path)) as file:
        schema, batches = open_arrow(file)
        name = column_named(path, column, schema.names)
        row = 0
        for batch in batches:
            if row + len(batch) > start:
                done = min(file.tell(), size)
                for number, value, _ in _values(batch.column(name), row, start, 1, 0):
                    yield number, value, done
            row += len(batch)


def open_arrow(file: Any) -> tuple[Any, Iterator[Any]]:
    """Return the schema and the record batches of an open Arrow file or stream."""
    arrow, ipc = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.ipc")
    try:
        reader = ipc.open_file(file)
        return reader.schema, (reader.get_batch(number) for number in range(reader.num_record_batches))
    except arrow.ArrowInvalid:  # Arrow's stream format, which Hugging Face datasets use
        file.seek(0)
        reader = ipc.open_stream(file)
        return reader.schema, iter(reader)


def _values(values: Any, first: int, start: int, total: int, size: int) -> Iterator[tuple[int, Any, int]]:
    skip = max(start - first, 0)
    part = values.slice(skip)
    lists = hasattr(part.type, "value_type")  # convert lists of tokens to arrays, not to Python lists
    for number in range(len(part)):
        value = part[number]
        row = first + skip + number
        known = value.is_valid
        yield (
            row,
            (value.values.to_numpy(zero_copy_only=False) if lists and known else value.as_py()),
            size * row // total,
        )


def column_named(path: Path, wanted: str, there: list[str]) -> str:
    """Return `wanted` if the file has this column.

    Raises:
        ConfigError: the file has no such column.
    """
    if wanted not in there:
        from hyperpod_ext.config.files.nearest import suggest

        raise ConfigError([Problem(f"there is no column {wanted}", source=str(path), hint=suggest(wanted, there))])
    return wanted


def load_pyarrow(module: str, path: Path) -> Any:
    """Import a module of pyarrow that is needed to read `path`.

    Raises:
        HyperpodExtError: pyarrow is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise HyperpodExtError(f"{path}: reading it needs pyarrow", hint="pip install 'hyperpod-ext[arrow]'") from None


class explained:  # noqa: N801 # used like a function
    """Context manager that converts errors of pyarrow about a damaged file to ConfigError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None and kind.__module__.startswith("pyarrow"):
            text = str(error).partition("\n")[0]
            raise ConfigError([Problem(f"cannot be read ({text})", source=str(self._path))]) from None
