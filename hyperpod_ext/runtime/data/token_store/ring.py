"""A cache on the node's disk for micro-batches that are expensive to make. The key of an entry is stream, step and slot
(number of the micro-batch in the step).

A slot has the same samples at any world size, so cached batches stay valid after a resize and for another rank. Missing
or damaged cache entries are made again and counted. The cache never changes the training data.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hyperpod_ext.errors import DiskFullError
from hyperpod_ext.runtime.data.token_store.files import TEMPORARY, make_folder, publish
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme
from hyperpod_ext.user_folders import expanded

Arrays = dict[str, npt.NDArray[Any]]

_MAGIC = b"HPXRDY1\n"
_FRAME = struct.Struct("<8sIQ")
_NAME = re.compile(r"(\d{12})-(\d{6})\.batch")
_ALIGN = 64
_ABANDONED_S = 600.0


@dataclass
class RingStats:
    """Numbers of this process's requests to the cache, by result."""

    hits: int = 0
    made: int = 0
    damaged: int = 0
    """Number of damaged cache entries, whose batches were made again."""
    not_kept: int = 0
    """Number of batches that could not be cached, because the disk was full."""


class ReadyRing:
    """The cached arrays of one stream, by step and slot."""

    def __init__(
        self, place: str | Path, stream: str, *, budget_bytes: int = 1 << 30, stale_after_s: float = 86400.0
    ) -> None:
        """`stream`: fingerprint of everything that determines a batch, such as source, seed, batch size, collate
        function.

        Removes streams under `place` that were not used for `stale_after_s` seconds.
        """
        self.stream, self.budget_bytes = stream, budget_bytes
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", stream)[:40]
        self.folder = expanded(place) / f"ring-{name}-{crc64nvme(stream.encode()):016x}"
        self.stats = RingStats()
        make_folder(self.folder)
        os.utime(self.folder)
        _sweep(self.folder, stale_after_s)

    def fetch(self, step: int, slot: int, make: Callable[[], Mapping[str, npt.NDArray[Any]]]) -> Arrays:
        """Return the cached arrays. If the arrays are not cached, calls `make`, and caches its result if there is
        room."""
        if (found := self.get(step, slot)) is not None:
            return found
        made = dict(make())
        self.stats.made += 1
        try:
            self.put(step, slot, made)
        except DiskFullError:
            self.stats.not_kept += 1
        return made

    def get(self, step: int, slot: int) -> Arrays | None:
        """Return the cached arrays from a mapped file; None if not cached. Only this process sees writes to the
        arrays."""
        path = self._path(step, slot)
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            return None
        except ValueError:  # an empty file cannot be mapped
            mapped = None
        arrays = None if mapped is None else self._parse(mapped, step, slot)
        if arrays is None:
            self.stats.damaged += 1
            path.unlink(missing_ok=True)
            return None
        self.stats.hits += 1
        return arrays

    def put(self, step: int, slot: int, arrays: Mapping[str, npt.NDArray[Any]]) -> bool:
        """Cache `arrays`, and remove the oldest steps to make room. Returns whether the arrays were cached.

        Arrays are not cached if later steps fill the budget, or for a ghost slot (below 0), whose loss does not count.

        Raises:
            DiskFullError: the disk has no room, even after removing old steps.
        """
        if slot < 0:
            return False
        parts: list[bytes | bytearray | memoryview] = []
        entries, at = [], 0
        for name, array in arrays.items():
            contiguous = np.asarray(array, order="C")
            if contiguous.dtype.hasobject:
                raise TypeError(f"{name}: arrays of objects cannot be cached, because nothing is pickled")
            entries.append({"name": name, "dtype": contiguous.dtype.str, "shape": contiguous.shape, "at": at})
            parts += [contiguous.reshape(-1).view(np.uint8).data, bytes(-contiguous.nbytes % _ALIGN)]
            at += contiguous.nbytes + -contiguous.nbytes % _ALIGN
        checksum = 0
        for part in parts:
            checksum = crc64nvme(part, checksum) if len(part) else checksum
        about = {"stream": self.stream, "step": step, "slot": slot, "crc64nvme": f"{checksum:016x}", "arrays": entries}
        text = json.dumps(about).encode()
        head = _FRAME.pack(_MAGIC, len(text), crc64nvme(text)) + text
        head = head.ljust(-(-len(head) // _ALIGN) * _ALIGN, b"\0")
        if not self._make_room(step, len(head) + at):
            return False
        publish(self._path(step, slot), [head, *parts])
        return True

    def ready(self) -> list[tuple[int, int]]:
        """Return (step, slot) of each cached batch, in order."""
        return sorted((step, slot) for step, slot, _, _ in self._entries())

    def _make_room(self, step: int, nbytes: int) -> bool:
        entries = sorted(self._entries())
        over = sum(size for _, _, size, _ in entries) + nbytes - self.budget_bytes
        for oldest, _, size, path in entries:
            if over <= 0:
                break
            if oldest >= step:
                return False  # later steps, which are still to be read, fill the budget
            path.unlink(missing_ok=True)
            over -= size
        return over <= 0

    def _entries(self) -> list[tuple[int, int, int, Path]]:
        found = []
        for item in os.scandir(self.folder):
            if match := _NAME.fullmatch(item.name):
                with suppress(FileNotFoundError):
                    found.append((int(match[1]), int(match[2]), item.stat().st_size, Path(item.path)))
        return found

    def _path(self, step: int, slot: int) -> Path:
        return self.folder / f"{step:012d}-{slot:06d}.batch"

    def _parse(self, mapped: mmap.mmap, step: int, slot: int) -> Arrays | None:
        """Return the arrays in a cache entry. None if the entry is damaged, or belongs to another stream, step or
        slot."""
        view = memoryview(mapped)
        if len(view) < _FRAME.size:
            return None
        magic, length, checksum = _FRAME.unpack_from(view)
        text = view[_FRAME.size : _FRAME.size + length]
        if magic != _MAGIC or crc64nvme(text) != checksum:
            return None
        about = json.loads(bytes(text))
        body = view[-(-(_FRAME.size + length) // _ALIGN) * _ALIGN :]
        if (about["stream"], about["step"], about["slot"]) != (self.stream, step, slot):
            return None
        if f"{crc64nvme(body) if len(body) else 0:016x}" != about["crc64nvme"]:
            return None
        found = {}
        for entry in about["arrays"]:
            count = int(np.prod(entry["shape"], dtype=np.int64))
            array = np.frombuffer(body, entry["dtype"], count, entry["at"]) if count else np.empty(0, entry["dtype"])
            found[str(entry["name"])] = array.reshape(entry["shape"])
        return found


def _sweep(folder: Path, stale_after_s: float) -> None:
    """Remove temporary files of killed writers, and streams that were not used for `stale_after_s` seconds."""
    now = time.time()
    for path in folder.glob(f".*{TEMPORARY}"):
        with suppress(FileNotFoundError):
            if now - path.stat().st_mtime > _ABANDONED_S:
                path.unlink()
    for other in folder.parent.glob("ring-*"):
        with suppress(FileNotFoundError):
            if other != folder and not other.is_symlink() and now - other.stat().st_mtime > stale_after_s:
                shutil.rmtree(other)
