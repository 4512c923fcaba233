"""Megatron's .bin and .idx files, memory-mapped: like a token store, they have contiguous tokens and an index."""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hyperpod_ext.errors import ConfigError, NotFoundError, Problem
from hyperpod_ext.runtime.data.token_store.mapped import MappedFile
from hyperpod_ext.runtime.data.token_store.segment import Tokens, windows_of
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme
from hyperpod_ext.user_folders import expanded

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def prefix_of(path: str | Path) -> Path:
    """Return the path without the suffix .bin or .idx."""
    path = expanded(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def is_megatron(path: str | Path) -> bool:
    """Return whether both the .bin and the .idx file of a Megatron dataset exist."""
    prefix = str(prefix_of(path))
    return Path(prefix + ".idx").is_file() and Path(prefix + ".bin").is_file()


class MegatronStore:
    """The sequences of a Megatron dataset, by number, as read-only arrays of shape [n].

    Other programs may overwrite these files, so each read checks that the files are unchanged.
    """

    def __init__(self, path: str | Path) -> None:
        """Map the dataset at `path`, which may end in .bin, .idx or neither.

        Raises:
            NotFoundError: a file is missing.
            ConfigError: the files are damaged, or contain no tokens.
        """
        self.prefix = prefix_of(path)
        self._idx, self._bin = Path(f"{self.prefix}.idx"), Path(f"{self.prefix}.bin")
        for file in (self._idx, self._bin):
            if not file.is_file():
                raise NotFoundError(f"there is no {file}", hint="A Megatron dataset is a .bin and an .idx.")
        self._read_index()
        need = int((self._pointers + self.lengths * self._dtype.itemsize).max()) if len(self.lengths) else 0
        size = self._bin.stat().st_size
        if size < need or not need:
            raise self._wrong(self._bin, f"it has {size:,} bytes, but the index needs {need:,}")
        self._file = MappedFile(self._bin)
        count = self._file.status.st_size // self._dtype.itemsize
        self._writable: Tokens = np.frombuffer(self._file.map, self._dtype, count)
        self._tokens = self._writable.view()
        self._tokens.flags.writeable = False
        self._rows = windows_of(self._tokens, 1)
        self._starts = self._pointers // self._dtype.itemsize
        self._count = len(self.lengths)
        self.tokens = int(self.lengths.sum(dtype=np.int64))
        self._in_row = bool((self._starts == np.cumsum(self.lengths, dtype=np.int64) - self.lengths).all())

    def _read_index(self) -> None:
        data = self._idx.read_bytes()
        if len(data) < _HEAD.size or not data.startswith(_MAGIC):
            raise self._wrong(self._idx, "it does not begin like an index of Megatron")
        _, version, code, sequences, documents = _HEAD.unpack_from(data)
        if version != 1 or code not in _DTYPES:
            raise self._wrong(self._idx, f"version {version} with type {code} is not supported")
        self._dtype = np.dtype(_DTYPES[code])
        plain = _HEAD.size + 12 * sequences + 8 * documents
        if len(data) not in (plain, plain + sequences):  # multimodal datasets have one more byte per sequence
            raise self._wrong(self._idx, f"it has {len(data):,} bytes, but its header lists {plain:,}")
        at = _HEAD.size
        self.lengths: npt.NDArray[np.int32] = np.frombuffer(data, "<i4", sequences, at)
        self._pointers: npt.NDArray[np.int64] = np.frombuffer(data, "<i8", sequences, at + 4 * sequences)
        if (self.lengths < 0).any() or (self._pointers < 0).any():
            raise self._wrong(self._idx, "it has negative lengths or places")
        self._crc = crc64nvme(data)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the tokens."""
        return self._dtype

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the whole index, and of the size, first MiB and last MiB of the .bin file."""
        return hashlib.sha256(repr([self._crc, *self._file.identity()]).encode()).hexdigest()[:32]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Tokens:
        return self.get(number)

    def get(self, number: int, writable: bool = False) -> Tokens:
        """Return sequence `number` as a view of shape [n]."""
        number = operator.index(number)
        if number < 0:
            number += self._count
        if not 0 <= number < self._count:
            raise IndexError(f"sequence {number} of {self._count}")
        begin: int = self._starts.item(number)
        return self._view(begin, begin + self.lengths.item(number), writable)

    def read(self, begin: int, end: int, writable: bool = False) -> Tokens:
        """Return tokens `begin` to `end` of the .bin file, as a view of shape [end - begin]."""
        self._need_row()
        if not 0 <= begin <= end <= self.tokens:
            raise IndexError(f"tokens {begin} to {end} of {self.tokens}")
        return self._view(begin, end, writable)

    def windows(self, begins: npt.NDArray[np.int64], length: int) -> Tokens:
        """Return the `length` tokens from each position in `begins` on, as a copy of shape [len(begins), length]."""
        self._need_row()
        places = begins.tolist()
        if min(places) < 0 or max(places) + length > self.tokens:
            raise IndexError(f"tokens {min(places)} to {max(places) + length} of {self.tokens}")
        rows = self._rows  # keep a reference: another thread may replace `_rows` for another `length`
        if rows.shape[1] != length:
            self._rows = rows = windows_of(self._tokens, length)
        self._file.check()
        return rows[begins]

    def document_starts(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the start positions of all sequences in the .bin file, in tokens.

        Raises:
            ConfigError: the sequences are not contiguous in the .bin file, so they cannot be packed.
        """
        self._need_row()
        yield self._starts

    def check_source(self) -> None:
        """Check that the files were not changed or replaced since they were mapped.

        Raises:
            DatasetChangedError: a file was changed or replaced.
        """
        self._file.check_name()

    def _need_row(self) -> None:
        if not self._in_row:
            raise self._wrong(self._idx, "its sequences are not contiguous, so they can only be read one by one")

    def _view(self, begin: int, end: int, writable: bool) -> Tokens:
        self._file.check()
        return (self._writable if writable else self._tokens)[begin:end]

    def _wrong(self, file: Path, why: str) -> ConfigError:
        return ConfigError([Problem(why, source=str(file), hint="make it again with Megatron's preprocess_data.py")])

    def __reduce__(self) -> tuple[Any, ...]:
        return MegatronStore, (str(self.prefix),)
