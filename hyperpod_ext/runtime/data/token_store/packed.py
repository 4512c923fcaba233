"""Samples of equal length from documents of any length. An array of sample starts, computed once, makes access by
number O(1).

With documents="split", all documents are concatenated and cut every `sequence_length` tokens, as for GPT pre-training.
With documents="whole", a sample has as many complete documents as fit, in order, followed by padding. Only documents
longer than a sample are cut.
"""

from __future__ import annotations

import hashlib
import mmap
import operator
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hyperpod_ext.errors import ConfigError, CorruptSegmentError, HyperpodExtError, Problem
from hyperpod_ext.runtime.data.token_store.files import publish
from hyperpod_ext.runtime.data.token_store.segment import Tokens
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme

INDEXES = "packed"


class TokenRow(Protocol):
    """Interface of a store that can be packed: a finished `TokenStore`, a `MegatronStore`, or an `ArrowStore`."""

    @property
    def tokens(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def read(self, begin: int, end: int, writable: bool = False) -> Tokens: ...

    def windows(self, begins: npt.NDArray[np.int64], length: int) -> Tokens: ...

    def document_starts(self) -> Iterator[Tokens]: ...


class Packed:
    """Samples of `sequence_length + 1` tokens. The inputs are `sample[:-1]`, and the targets are `sample[1:]`."""

    def __init__(self, store: Any, sequence_length: int, *, documents: str = "split", pad: int = 0) -> None:
        """Pack the documents of `store`. `documents`: "split" or "whole". `pad`: token that fills the rest of a sample
        with documents="whole".

        Raises:
            UnknownLengthError: the store is still growing.
            ConfigError: the store has not enough tokens for one sample.
        """
        if sequence_length < 1 or documents not in ("split", "whole"):
            wrong = f"sequence_length={sequence_length} or documents={documents!r} is not valid"
            hint = "sequence_length must be at least 1, and documents split or whole"
            raise ConfigError([Problem(wrong, path="packing", hint=hint)])
        self._store: TokenRow = store
        self.sequence_length, self.documents, self.pad = sequence_length, documents, pad
        text = f"{store.fingerprint} {sequence_length} {documents} {pad if documents == 'whole' else ''}"
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:32]
        self._begins = self._unsplit_begins() if documents == "whole" else None
        self._count = max(store.tokens - 1, 0) // sequence_length if self._begins is None else len(self._begins) - 1
        if not self._count:
            wrong = f"the store has only {store.tokens} tokens, but one sample needs {sequence_length + 1}"
            wrong += ", one more than the sequence length"
            raise ConfigError([Problem(wrong, path="packing", hint="choose a shorter sequence length")])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Tokens:
        return self.get(number)

    def get(self, number: int, writable: bool = False) -> Tokens:
        """Return sample `number`, of shape [sequence_length + 1].

        The sample is a view, or a copy if it is padded or in two segments."""
        begin, end = self._range(number)
        tokens = self._store.read(begin, end, writable)
        if (short := self.sequence_length + 1 - len(tokens)) > 0:
            kind = self._padded_type(tokens)
            return np.concatenate([tokens.astype(kind, copy=False), np.full(short, self.pad, kind)])
        return tokens if self._begins is None else tokens.astype(self._padded_type(tokens), copy=False)

    def batch(self, numbers: Sequence[int], dtype: npt.DTypeLike | None = np.int64) -> npt.NDArray[Any]:
        """Return samples as one array of shape [len(numbers), sequence_length + 1]. The default type int64 can be
        passed to an embedding.

        dtype: type of the result. With None, the array keeps the stored type, which is smaller to transfer and can be
            cast on the device.
        """
        rows = self._split_batch(numbers) if self._begins is None else self._unsplit_batch(numbers)
        return rows if dtype is None else rows.astype(dtype, copy=False)

    def _split_batch(self, numbers: Sequence[int]) -> Tokens:
        length, ids = self.sequence_length, np.asarray(numbers)
        if ids.size and ids.dtype.kind in "iu":
            try:
                return self._store.windows(ids.astype(np.int64, copy=False) * length, length + 1)
            except IndexError:
                pass  # a number is negative or out of range, which the code below handles
        known = [self._number(number) for number in numbers]
        return self._store.windows(np.array(known or [0], np.int64) * length, length + 1)[: len(known)]

    def _unsplit_batch(self, numbers: Sequence[int]) -> Tokens:
        parts = [self._store.read(*self._range(number)) for number in numbers]
        kind = self._padded_type(*parts)
        out = np.full((len(parts), self.sequence_length + 1), self.pad, kind)
        for row, part in zip(out, parts, strict=True):
            row[: len(part)] = part
        return out

    def _padded_type(self, *parts: Tokens) -> np.dtype[Any]:
        """Return a type that can represent both the tokens in `parts` and the padding, for example u16 and -100."""
        return np.result_type(np.min_scalar_type(self.pad), *{part.dtype for part in parts})

    def boundaries(self, number: int) -> npt.NDArray[np.int64]:
        """Return the offsets in sample `number` at which documents begin, for attention masks. The first offset is
        0."""
        begin, end = self._range(number)
        starts = self._document_starts()
        inside = starts[np.searchsorted(starts, begin, "right") : np.searchsorted(starts, end, "left")] - begin
        return np.unique(np.concatenate([np.zeros(1, np.int64), inside]))

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (self._store, self.sequence_length, self.documents, self.pad)

    def _range(self, number: int) -> tuple[int, int]:
        number = self._number(number)
        if self._begins is not None:
            return int(self._begins[number]), int(self._begins[number + 1])
        begin = number * self.sequence_length
        return begin, begin + self.sequence_length + 1

    def _number(self, number: int) -> int:
        number = operator.index(number)
        if not -self._count <= number < self._count:
            raise IndexError(f"sample {number} of {self._count}")
        return number + self._count if number < 0 else number

    def _document_starts(self) -> npt.NDArray[np.int64]:
        if not hasattr(self, "_starts"):
            self._starts = np.concatenate([np.zeros(0, np.int64), *self._store.document_starts()])
        return self._starts

    def _unsplit_begins(self) -> npt.NDArray[np.int64]:
        """Return the array of sample starts for documents="whole". The first process computes the array and publishes
        it as a file, which later processes map."""
        folder = getattr(self._store, "folder", None)
        path = None if folder is None else Path(folder) / INDEXES / f"{self.fingerprint}.i64"
        if path is not None and path.exists():
            return _read_index(path)
        begins = unsplit_begins(self._document_starts(), self._store.tokens, self.sequence_length + 1)
        if path is not None:
            # on a read-only or full disk, the array is not published, and each process computes it
            with suppress(HyperpodExtError, OSError):
                path.parent.mkdir(exist_ok=True)
                publish(path, [begins.data, crc64nvme(begins.data.cast("B")).to_bytes(8, "little")])
        return begins


def unsplit_begins(starts: npt.NDArray[np.int64], tokens: int, size: int) -> npt.NDArray[np.int64]:
    """Return the token positions at which samples begin if no sample splits a document, as int64 of shape [samples +
    1]. Pure.

    Sample i has the tokens from begins[i] to begins[i + 1], at most `size` tokens. The last entry is `tokens`, the
    number of all tokens. `starts`: positions at which the documents begin.
    """
    ends = np.append(starts[1:], tokens)
    pieces = np.maximum(-(-(ends - starts) // size), 1)  # documents longer than a sample are cut
    first = np.repeat(starts, pieces)
    number = np.arange(len(first)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    piece_ends = np.minimum(first + (number + 1) * size, np.repeat(ends, pieces))
    begins = [0]
    while begins[-1] < tokens:
        begins.append(int(piece_ends[np.searchsorted(piece_ends, begins[-1] + size, "right") - 1]))
    return np.array(begins, dtype="<i8")


def _read_index(path: Path) -> npt.NDArray[np.int64]:
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    begins = np.frombuffer(mapped, "<i8", len(mapped) // 8 - 1)
    if crc64nvme(begins.data.cast("B")) != int.from_bytes(mapped[-8:], "little"):
        raise CorruptSegmentError(
            f"{path} does not match its checksum", hint=f"Delete it with `rm {path}`: it is built again when needed."
        )
    return begins


def _make(store: Any, sequence_length: int, documents: str, pad: int) -> Packed:
    return Packed(store, sequence_length, documents=documents, pad=pad)
