"""Atomic writes, files that only this user can read, and safe reads of files that other users may have created.

The module needs only the standard library, because both the command line and the container import it.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

LARGEST_TEXT = 64 << 20
"""Default limit in bytes for a file that is read as a whole."""


_ROOM = "reserved"
"""Name of a file that reserves disk space in a folder, so that the last writes succeed even if the disk is full."""
_ROOM_BYTES = 64 << 10
_FULL = {errno.ENOSPC, errno.EDQUOT}


def write_atomically(file: Path, text: str, *, last: bool = False) -> None:
    """Write `text` to `file`, and replace an existing file atomically. Only this user can read the file.

    Args:
        last: whether the write may use the disk space that `reserve_room` has reserved in the file's folder, if the
            disk is full.
    """
    try:
        _write_atomically(file, text)
    except OSError as error:
        if not (last and error.errno in _FULL and release_room(file.parent)):
            raise
        _write_atomically(file, text)


def _write_atomically(file: Path, text: str) -> None:
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    with suppress(FileNotFoundError):  # remove an old file, or a symbolic link, with this name
        partial.unlink()
    try:
        with open_private(partial, "x") as written:
            written.write(text)
        partial.rename(file)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        # add the file's name, which errors of `write` lack
        raise OSError(error.errno, error.strerror, str(file)) from None


def reserve_room(folder: Path) -> None:
    """Reserve disk space in `folder` for the last writes of a process. `release_room` frees the reserved space.

    Raises:
        OSError: the disk is full or not writable.
    """
    with open_private(folder / _ROOM, "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)
        except OSError as error:
            release_room(folder)
            raise OSError(error.errno, error.strerror, str(folder)) from None


def release_room(folder: Path) -> bool:
    """Free the disk space that `reserve_room` reserved in `folder`. Return False if no space was reserved."""
    try:
        (folder / _ROOM).unlink()
    except OSError:
        return False
    return True


def make_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents, which only this user can enter. Existing folders are not changed."""
    if not folder.is_dir():
        make_private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def open_private(file: Path, mode: str, buffering: int = -1) -> IO[Any]:
    """Open a file that only this user can read if it is new. The encoding of text is UTF-8."""
    encoding = None if "b" in mode else "utf-8"
    return open(file, mode, buffering, encoding=encoding, opener=_only_ours)


def _only_ours(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def open_regular(file: Path) -> IO[bytes]:
    """Open a file that other users may have created, for reading. The call never blocks, even if the file is a pipe.

    Raises:
        OSError: the file does not exist, or is a pipe, a device, a socket or a folder.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(file))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def json_files(folder: Path) -> list[Path]:
    """Return the JSON files in a folder, sorted by name. Empty if the folder is missing or cannot be read."""
    try:
        return sorted(folder.glob("*.json")) if folder.is_dir() else []
    except OSError:
        return []


def read_regular(file: Path, limit: int = LARGEST_TEXT) -> bytes:
    """Return the content of a file that other users may have created.

    Raises:
        OSError: the file has more than `limit` bytes, or `open_regular` refuses the file.
    """
    with open_regular(file) as opened:
        data = opened.read(limit + 1) if os.fstat(opened.fileno()).st_size <= limit else None
    if data is None or len(data) > limit:
        raise OSError(errno.EFBIG, f"more than {limit} bytes", str(file))
    return data


def sync_directory(path: Path) -> None:
    """Write a directory to disk with fsync, so that the names of new files survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
