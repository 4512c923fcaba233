"""Files through which the processes of a node pass events to the node's memory server.

The memory server uploads the lines, and then empties the files.

Each process appends to a file of its own, whose name is the process id. Lines of a killed process stay in its file.
Appending a line takes microseconds. A writer only waits while the memory server is emptying the same file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SUFFIX = ".jsonl"
_EMPTIED_BYTES = 1 << 20
"""Size in bytes above which a file is emptied when all its lines are uploaded."""
_MOST_BYTES = 64 << 20
"""Size in bytes above which a file is emptied even if its lines are not uploaded."""


class SpoolWriter:
    """Appends to this process's file in `directory`.

    If the disk is full or broken, lines are lost, stderr gets one message, and the process continues."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"{os.getpid()}{_SUFFIX}"
        self._file: int | None = None
        self._failed = False
        with self._may_fail():
            self._open()

    def write(self, line: bytes) -> None:
        """Append a line to this process's file."""
        with self._may_fail(), _locked(file := self._open()):
            # remove a partly written line, so that the next event starts on a new line
            if (written := os.write(file, line)) < len(line):
                os.ftruncate(file, os.fstat(file).st_size - written)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def _open(self) -> int:
        if self._file is None:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._file

    @contextlib.contextmanager
    def _may_fail(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._failed:
                sys.stderr.write(f"hyperpod_ext: {self._path} cannot be written, events are lost: {error.strerror}\n")
            self._failed = True


@dataclass(slots=True)
class _Read:
    """How far one file has been read and uploaded."""

    offset: int = 0
    kept: int = 0
    """Number of bytes of the file that are uploaded."""


class SpoolReader:
    """Reads the event lines in all files in `directory`. Only one process may read a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[int, _Read] = {}

    def read(self) -> dict[int, list[bytes]]:
        """Return the complete lines that are new, by the id of the process that wrote them."""
        found: dict[int, list[bytes]] = {}
        for path in sorted(self._directory.glob(f"*{_SUFFIX}")):
            if not path.stem.isdecimal():
                continue
            known = self._files.setdefault(int(path.stem), _Read())
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(known.offset)
                new = file.read()
                lines = new[: new.rfind(b"\n") + 1]
                known.offset += len(lines)
                if lines:
                    found[int(path.stem)] = lines.splitlines(keepends=True)
        return found

    def keep(self) -> None:
        """Mark all lines read so far as uploaded. Empties long files, and removes the files of ended processes."""
        for known in self._files.values():
            known.kept = known.offset
        self._tidy()

    def shed(self) -> int:
        """Empty files that are too long, although their lines are not uploaded. Returns the number of lost bytes."""
        return self._tidy(_MOST_BYTES)

    @property
    def left(self) -> bool:
        """Whether some lines are not uploaded yet."""
        return any(self._size(pid) > known.kept for pid, known in list(self._files.items()))

    def _tidy(self, unkept: int | None = None) -> int:
        lost = 0
        for pid, known in list(self._files.items()):
            path = self._directory / f"{pid}{_SUFFIX}"
            with contextlib.suppress(OSError):
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    with _locked(file):
                        size = os.fstat(file).st_size
                        if size == known.kept and not Path(f"/proc/{pid}").exists():
                            path.unlink()
                            del self._files[pid]
                        elif (size == known.kept and size > _EMPTIED_BYTES) or (unkept is not None and size > unkept):
                            lost += size - known.kept
                            os.ftruncate(file, 0)
                            self._files[pid] = _Read()
                finally:
                    os.close(file)
        return lost

    def _size(self, pid: int) -> int:
        try:
            return (self._directory / f"{pid}{_SUFFIX}").stat().st_size
        except OSError:
            return 0


@contextlib.contextmanager
def _locked(file: int) -> Iterator[None]:
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
