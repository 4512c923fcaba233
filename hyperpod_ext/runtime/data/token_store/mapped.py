"""Dataset files that are memory-mapped without conversion. Other programs may overwrite a mapped file, so each read
first checks that the file is unchanged."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from hyperpod_ext.errors import DatasetChangedError
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme

_ENDS = 1 << 20
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class MappedFile:
    """A file that is mapped as a whole. The mapping is private and writable, so that tensors need no copy, and only
    this process sees writes."""

    def __init__(self, path: Path) -> None:
        """Map the file at `path`. The file must not be empty."""
        self.path = path
        self._file = path.open("rb")
        self._descriptor = self._file.fileno()
        self.status = os.fstat(self._descriptor)
        self._size, self._mtime_ns = self.status.st_size, self.status.st_mtime_ns
        self.map = mmap.mmap(
            self._descriptor, self._size, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )

    def check(self) -> None:
        """Check that the file is unchanged. Without this check, reading a truncated file's mapping would cause SIGBUS.

        Raises:
            DatasetChangedError: the file was changed.
        """
        now = os.fstat(self._descriptor)
        if now.st_mtime_ns != self._mtime_ns or now.st_size != self._size:
            raise self._changed(f"it was written to, and has {now.st_size:,} bytes now")

    def check_name(self) -> None:
        """Check that the file is unchanged, and that its name still refers to the same file."""
        try:
            now = self.path.stat()
        except FileNotFoundError:
            raise self._changed("it is gone") from None
        if not os.path.samestat(now, self.status):
            raise self._changed("another file has its name now")
        self.check()

    def identity(self) -> list[int]:
        """Return the file's size and the checksums of its first and last MiB, which identify the file."""
        end = self._size
        with memoryview(self.map) as view, view[:_ENDS] as head, view[max(end - _ENDS, 0) :] as tail:
            return [end, crc64nvme(head), crc64nvme(tail)]

    def _changed(self, why: str) -> DatasetChangedError:
        return DatasetChangedError(
            f"{self.path}: the dataset was changed during the run: {why}",
            hint="Restore the old dataset, or start a new run with the new one.",
        )
