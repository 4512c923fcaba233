"""Access to documents by number over several segments: the base class of token stores and of mapped Arrow files."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from hyperpod_ext.runtime.data.token_store.segment import Tokens


class DocumentRange(Protocol):
    """Interface of a segment: several documents whose tokens are contiguous in a file."""

    @property
    def offsets(self) -> npt.NDArray[Any]:
        """Token offset of the beginning of each document, counted from 0, followed by the end of the last document."""

    def document(self, at: int, writable: bool = False) -> Tokens: ...

    def tokens(self, begin: int, end: int, writable: bool = False) -> Tokens: ...

    def windows(self, begins: npt.NDArray[np.int64], length: int) -> Tokens: ...


P = TypeVar("P", bound=DocumentRange)


class Documents(Generic[P]):
    """Documents by number: `documents[i]` is a read-only array of shape [n] in the memory of the mapped file."""

    def __init__(self) -> None:
        self.segments: list[P] = []
        self._documents = [0]  # number of documents before each segment, and last the number of all documents
        self._tokens = [0]

    def _add(self, segment: P) -> None:
        self.segments.append(segment)
        self._documents.append(self._documents[-1] + len(segment.offsets) - 1)
        self._tokens.append(self._tokens[-1] + segment.offsets.item(-1))

    @property
    def tokens(self) -> int:
        """Number of tokens that can be read now."""
        return self._tokens[-1]

    def __len__(self) -> int:
        return self._documents[-1]

    def __getitem__(self, number: int) -> Tokens:
        return self.get(number)

    def get(self, number: int, writable: bool = False) -> Tokens:
        """Return document `number` as a view of shape [n]. If `writable`, only this process sees writes to the view.

        Raises:
            CorruptSegmentError: the tokens do not match their checksum.
            DatasetChangedError: the file has changed since it was mapped.
        """
        number = operator.index(number)
        if not 0 <= number < self._documents[-1]:
            number = self._reached(number)
        index = bisect_right(self._documents, number) - 1
        return self.segments[index].document(number - self._documents[index], writable)

    def read(self, begin: int, end: int, writable: bool = False) -> Tokens:
        """Return tokens `begin` to `end`, counted over all documents, as an array of shape [end - begin].

        The array is a view if one segment contains all requested tokens, otherwise a copy."""
        if not 0 <= begin <= end <= self._tokens[-1]:
            raise IndexError(f"tokens {begin} to {end} of {self._tokens[-1]}")
        index = bisect_right(self._tokens, begin) - 1
        if begin == end:
            index = min(index, len(self.segments) - 1)
        first = self._tokens[index]
        if end <= self._tokens[index + 1]:
            return self.segments[index].tokens(begin - first, end - first, writable)
        return self._joined(begin, end, index)

    def windows(self, begins: npt.NDArray[np.int64], length: int) -> Tokens:
        """Return the `length` tokens from each position in `begins` on, as a copy of shape [len(begins), length]."""
        places = begins.tolist()
        least, most, ends = min(places), max(places) + length, self._tokens
        if least < 0 or most > ends[-1]:
            raise IndexError(f"tokens {least} to {most} of {ends[-1]}")
        index = bisect_right(ends, least) - 1
        if most <= ends[index + 1]:  # all windows are in one segment, so one gather is enough
            return self.segments[index].windows(begins - before if (before := ends[index]) else begins, length)
        rows = []
        for place in places:
            index = bisect_right(ends, place) - 1
            begin = place - ends[index]
            if place + length <= ends[index + 1]:
                rows.append(self.segments[index].tokens(begin, begin + length))
            else:
                rows.append(self._joined(place, place + length, index))
        return np.concatenate(rows).reshape(len(rows), length)

    def document_starts(self) -> Iterator[Tokens]:
        """Yield the start positions of documents, counted in tokens of the whole store, as one int64 array per segment.

        The end of the last document is not included."""
        for segment, first in zip(self.segments, self._tokens, strict=False):
            yield segment.offsets[:-1].astype("i8") + first

    def _reached(self, number: int) -> int:
        """Return the index of a document whose `number` is negative or not available yet."""
        count = len(self)
        if not -count <= number < count:
            raise IndexError(f"document {number} of {count}")
        return number + count if number < 0 else number

    def _joined(self, begin: int, end: int, index: int) -> Tokens:
        parts = []
        while begin < end:
            first, upto = self._tokens[index], min(end, self._tokens[index + 1])
            parts.append(self.segments[index].tokens(begin - first, upto - first))
            begin, index = upto, index + 1
        return np.concatenate(parts)
