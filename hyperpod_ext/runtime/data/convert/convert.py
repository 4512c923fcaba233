"""Converts a dataset to a token store: reads records, tokenises them, and appends them to the store. Continues where a
killed conversion ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hyperpod_ext.errors import ConfigError, DatasetChangedError, DiskFullError, Problem
from hyperpod_ext.runtime.data.convert.tokenizers import Tokenizer, find
from hyperpod_ext.runtime.data.token_store.eviction import evict, nbytes_of
from hyperpod_ext.runtime.data.token_store.files import FileLock
from hyperpod_ext.runtime.data.token_store.identity import changes, identify
from hyperpod_ext.runtime.data.token_store.reader import TokenStore
from hyperpod_ext.runtime.data.token_store.segment import SegmentInfo, Tokens
from hyperpod_ext.runtime.data.token_store.sources import SPLITS, Position, find_files, kind_of, rows
from hyperpod_ext.runtime.data.token_store.writer import SEGMENT_BYTES, StoreWriter, key_of
from hyperpod_ext.user_folders import expanded

CODE = 1
"""Version of the conversion code. Increment the version when a change of the code leads to different tokens from the
same source."""
PLACE = "HPX_DATA_DIR"
_BATCH_TEXTS, _BATCH_CHARS = 256, 1 << 20
_EXAMPLES = 20

Next = Mapping[str, int]
"""Position in the source files after a document, and the number of records that were skipped before this position."""


@dataclass(frozen=True)
class Recipe:
    """Source files and conversion options of a token store."""

    sources: tuple[str, ...]
    tokenizer: str | Callable[[str], Any] = "bytes"
    field: str = "text"
    """Field of each record that contains text or a list of tokens. A list of tokens is stored without tokenising it."""
    split: str = "file"
    """Unit of plain text that becomes one document: `file`, `lines` or `paragraphs`."""
    eod: int | None = None
    """Token that is appended to each document; None for no token."""
    on_bad_record: str = "fail"
    """`fail`: raise at the first unusable record. `skip`: leave unusable records out and count them."""
    segment_bytes: int = SEGMENT_BYTES

    def __post_init__(self) -> None:
        wrong = []
        if self.split not in SPLITS:
            wrong.append(
                Problem(f"`{self.split}` is not a valid value", path="split", hint=f"valid: {', '.join(SPLITS)}")
            )
        if self.on_bad_record not in ("fail", "skip"):
            message = f"`{self.on_bad_record}` is not a valid value"
            wrong.append(Problem(message, path="on_bad_record", hint="valid: fail, skip"))
        if self.eod is not None and self.eod < 0:
            wrong.append(Problem(f"{self.eod} is not a token id", path="eod", hint="write a number from 0 on, or None"))
        if self.segment_bytes < 1:
            wrong.append(
                Problem(f"{self.segment_bytes} is out of range", path="segment_bytes", hint="it must be at least 1")
            )
        if wrong:
            raise ConfigError(wrong)


@dataclass
class Prepared:
    """A conversion recipe with the source files that were found, and the folder and identity of the token store."""

    recipe: Recipe
    files: list[Path]
    tokenizer: Tokenizer
    about: Mapping[str, Any]
    folder: Path

    @property
    def nbytes(self) -> int:
        """Total size of the source files."""
        return sum(int(each["nbytes"]) for each in self.about["source"])


@dataclass
class Skipped:
    """Number of skipped records, and the first few skipped records as examples."""

    count: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)


def default_place() -> Path:
    """Return this node's folder for token stores: $HPX_DATA_DIR (best on a local NVMe disk), or the user's cache."""
    return expanded(os.environ.get(PLACE) or "~/.cache/hyperpod_ext/data")


def prepare(recipe: Recipe, place: str | Path | None = None) -> Prepared:
    """Find the source files, and compute the token store's name.

    Raises:
        ConfigError, NotFoundError: the recipe is invalid, or files are missing.
    """
    files = find_files(recipe.sources)
    tokenizer = find(recipe.tokenizer)
    about = {
        "format": 1,
        "code": CODE,
        "source": identify(files),
        "tokenizer": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "field": recipe.field,
        "split": recipe.split,
        "eod": recipe.eod,
        "on_bad_record": recipe.on_bad_record,
        "segment_bytes": recipe.segment_bytes,
    }
    root = default_place() if place is None else expanded(place)
    name = files[0].name.partition(".")[0][:40] or "data"
    return Prepared(recipe, files, tokenizer, about, root / f"{name}-{key_of(about)[:16]}")


def build(
    sources: str | Path | Sequence[str | Path],
    *,
    place: str | Path | None = None,
    budget_bytes: int | None = None,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
    **options: Any,
) -> TokenStore:
    """Return the finished token store of a dataset. Converts the dataset first if necessary.

    `options` are the fields of `Recipe`.

    Raises:
        ConfigError, NotFoundError: the dataset cannot be read with these options.
        ConflictError: another process is converting the dataset. `follow` waits for the other process and does not
            raise this error.
        DatasetChangedError: the dataset was changed during the conversion.
        DiskFullError: no space is left. Complete segments stay, and the next conversion continues after them.
    """
    many = [sources] if isinstance(sources, str | Path) else sources
    prepared = prepare(Recipe(tuple(map(str, many)), **options), place)
    run(prepared, budget_bytes=budget_bytes, on_bytes=on_bytes)
    return TokenStore(prepared.folder)


def run(
    prepared: Prepared,
    *,
    lock: FileLock | None = None,
    budget_bytes: int | None = None,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
    on_segment: Callable[[SegmentInfo], None] = lambda info: None,
) -> None:
    """Convert the rest of the dataset, after the newest published segment. `lock`: the store's lock, if the caller
    already holds this lock."""
    recipe, tokenizer = prepared.recipe, prepared.tokenizer
    vocab_size = None if tokenizer.vocab_size is None else max(tokenizer.vocab_size, (recipe.eod or 0) + 1)

    def check() -> None:
        _check_unchanged(prepared)
        if budget_bytes is not None:
            _make_room(prepared, budget_bytes)

    options: dict[str, Any] = {"segment_bytes": recipe.segment_bytes, "vocab_size": vocab_size, "lock": lock}
    with StoreWriter(prepared.folder, prepared.about, before_publish=check, **options) as writer:
        if writer.finished:
            return
        start = Position.of(writer.position)
        skipped = Skipped(int(writer.position.get("skipped", 0)))
        on_bytes(sum(int(each["nbytes"]) for each in prepared.about["source"][: start.file]))
        read = rows(prepared.files, start, field=recipe.field, split=recipe.split, on_bytes=on_bytes)
        try:
            for following, tokens in _tokenised(_values(read, prepared, skipped), prepared):
                if (info := writer.append(tokens, following)) is not None:
                    on_segment(info)
        except (OSError, ConfigError):
            _check_unchanged(prepared)  # a truncated file may still be being written by another process
            raise
        if writer.documents == 0:
            why = f"all {skipped.count} records were left out" if skipped.count else "the dataset has no records"
            raise ConfigError([Problem(f"there are no documents: {why}", source=", ".join(recipe.sources))])
        writer.finish({"skipped": {"count": skipped.count, "examples": skipped.examples}})


def _values(
    read: Iterator[tuple[Position, Position, Any]], prepared: Prepared, skipped: Skipped
) -> Iterator[tuple[Next, Any]]:
    """Yield each record's text or array of tokens. For a record with neither text nor tokens, raises an error or skips
    the record."""
    for here, following, record in read:
        value = _value(record, prepared.recipe.field)
        if not isinstance(value, ValueError):
            yield {**following.as_dict(), "skipped": skipped.count}, value
            continue
        path = prepared.files[here.file]
        # in errors: the line number, or the record's number if records are not lines
        number = here.record + 1
        lacks = isinstance(record, dict) and prepared.recipe.field not in record
        hint = f"{'name the field with --field; ' if lacks else ''}--on-bad-record skip leaves such records out"
        problem = Problem(str(value), source=str(path), line=number, hint=hint)
        if prepared.recipe.on_bad_record == "fail":
            raise ConfigError([problem])
        skipped.count += 1
        if len(skipped.examples) < _EXAMPLES:
            skipped.examples.append({"file": str(path), "record": number, "why": str(value)})


def _value(record: Any, name: str) -> Any:
    """Return the text or tokens of a record, or a ValueError with the reason if the record has neither text nor
    tokens."""
    value = record
    if isinstance(record, dict):
        if name not in record:
            from hyperpod_ext.config.files.nearest import nearest

            near, fields = nearest(name, map(str, record)), ", ".join(f"`{one}`" for one in record)
            more = f"; did you mean `{near}`?" if near else f", only {fields}" if fields else ""
            return ValueError(f"has no field `{name}`{more}")
        value = record[name]
    if isinstance(value, str | np.ndarray | ValueError):
        return value
    if isinstance(value, list) and all(type(token) is int for token in value):
        return np.array(value, dtype=np.int64)
    if isinstance(value, list):
        other = next(type(token).__name__ for token in value if type(token) is not int)
        return ValueError(f"`{name}` is a list with a value of type {other}, but tokens are whole numbers")
    return ValueError(f"`{name}` is neither text nor a list of tokens, but {type(value).__name__}")


def _tokenised(values: Iterator[tuple[Next, Any]], prepared: Prepared) -> Iterator[tuple[Next, Tokens]]:
    """Yield the tokens of each text or token array in `values`, in order. Texts are tokenised in batches."""
    waiting: list[tuple[Next, Any]] = []
    chars = 0
    for following, value in values:
        waiting.append((following, value))
        chars += len(value)
        if len(waiting) >= _BATCH_TEXTS or chars >= _BATCH_CHARS:
            yield from _encode(waiting, prepared)
            waiting, chars = [], 0
    yield from _encode(waiting, prepared)


def _encode(values: Sequence[tuple[Next, Any]], prepared: Prepared) -> Iterator[tuple[Next, Tokens]]:
    texts = [value for _, value in values if isinstance(value, str)]
    encoded = iter(prepared.tokenizer.encode(texts) if texts else ())
    for following, value in values:
        row = next(encoded) if isinstance(value, str) else value
        tokens = np.asarray(row) if len(row) else np.empty(0, np.uint8)
        if prepared.recipe.eod is not None:
            tokens = np.append(tokens.astype(np.int64), prepared.recipe.eod)
        yield following, tokens


def _check_unchanged(prepared: Prepared) -> None:
    if found := changes(prepared.about["source"]):
        raise DatasetChangedError(
            f"the dataset was changed while it was converted: {'; '.join(found)}",
            hint="Nothing was published after the change. Build again when the dataset is complete.",
        )


def _make_room(prepared: Prepared, budget_bytes: int) -> None:
    root = prepared.folder.parent
    evict(root, budget_bytes, keep=[prepared.folder])
    if (there := nbytes_of(prepared.folder)) > budget_bytes:
        raise DiskFullError(
            f"{prepared.folder} has {there:,} bytes and is not finished, but the budget is {budget_bytes:,} bytes",
            hint="Give a larger --budget. The conversion then continues from here.",
        )


__all__ = ["Prepared", "Recipe", "build", "default_place", "kind_of", "prepare", "run"]
