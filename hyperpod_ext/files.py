"""Atomic writes, private files, and safe reads of files that others may have put in place.

Standard library only; shared by the laptop side and the container.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

LARGEST_TEXT = 64 << 20
"""Most bytes of a file that is read whole."""


_ROOM = "reserved"
"""File that reserves room in a folder for last writes."""
_ROOM_BYTES = 64 << 10
_FULL = {errno.ENOSPC, errno.EDQUOT}


def write_atomically(file: Path, text: str, *, last: bool = False) -> None:
    """Replace `file` atomically. Only this user can read it.

    Args:
        last: if the disk is full, use the room that `reserve_room` has reserved in its folder.
    """
    try:
        _write_atomically(file, text)
    except OSError as error:
        if not (last and error.errno in _FULL and release_room(file.parent)):
            raise
        _write_atomically(file, text)


def _write_atomically(file: Path, text: str) -> None:
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    with suppress(FileNotFoundError):  # a link in its place would be followed
        partial.unlink()
    try:
        with open_private(partial, "x") as written:
            written.write(text)
        partial.rename(file)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise OSError(error.errno, error.strerror, str(file)) from None  # errors of writes lack the file


def reserve_room(folder: Path) -> None:
    """Reserve room in `folder` for last writes, until `release_room`.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    with open_private(folder / _ROOM, "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)
        except OSError as error:
            release_room(folder)
            raise OSError(error.errno, error.strerror, str(folder)) from None


def release_room(folder: Path) -> bool:
    """Release the reserved room in `folder`, and return whether there was any."""
    try:
        (folder / _ROOM).unlink()
    except OSError:
        return False
    return True


def make_private_folder(folder: Path) -> None:
    """Make a folder that only this user can enter, with missing parents. Existing folders are not changed."""
    if not folder.is_dir():
        make_private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def open_private(file: Path, mode: str, buffering: int = -1) -> IO[Any]:
    """Open a file; if it is new, only this user can read it. Text is UTF-8."""
    encoding = None if "b" in mode else "utf-8"
    return open(file, mode, buffering, encoding=encoding, opener=_only_ours)


def _only_ours(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def open_regular(file: Path) -> IO[bytes]:
    """Open a file that others may have put in place, for reading. Does not block, as opening a pipe would.

    Raises:
        OSError: it does not exist, or is a pipe, a device, a socket or a folder.
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
    """Return the JSON files of a folder, by name; none if it is missing or cannot be read."""
    try:
        return sorted(folder.glob("*.json")) if folder.is_dir() else []
    except OSError:
        return []


def read_regular(file: Path, limit: int = LARGEST_TEXT) -> bytes:
    """Read all of a file that others may have put in place.

    Raises:
        OSError: as `open_regular`, or the file has more than `limit` bytes.
    """
    with open_regular(file) as opened:
        data = opened.read(limit + 1) if os.fstat(opened.fileno()).st_size <= limit else None
    if data is None or len(data) > limit:
        raise OSError(errno.EFBIG, f"more than {limit} bytes", str(file))
    return data


def sync_directory(path: Path) -> None:
    """Sync a directory, so that names of new files survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
