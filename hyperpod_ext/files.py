"""Files that readers see whole or not at all, that only their owner reads, and that strangers may have put there.

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
"""Most bytes of a file that is read as a whole."""


_ROOM = "reserved"
"""File of a folder that holds room for what must be written there last."""
_ROOM_BYTES = 64 << 10
_FULL = {errno.ENOSPC, errno.EDQUOT}


def write_atomically(file: Path, text: str, *, last: bool = False) -> None:
    """Replace `file`, which only this user can read: readers see all of the old text or all of the new.

    Args:
        last: if the disk is full, take the room that `reserve_room` has kept in its folder.
    """
    try:
        _write_atomically(file, text)
    except OSError as error:
        if not (last and error.errno in _FULL and release_room(file.parent)):
            raise
        _write_atomically(file, text)


def _write_atomically(file: Path, text: str) -> None:
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    with suppress(FileNotFoundError):  # a link that somebody put there would be followed
        partial.unlink()
    try:
        with open_private(partial, "x") as written:
            written.write(text)
        partial.rename(file)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise OSError(error.errno, error.strerror, str(file)) from None  # which file, a write alone does not say


def reserve_room(folder: Path) -> None:
    """Keep room in `folder` for what is written there last, until `release_room`.

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
    """Give up the room that was kept in `folder`; returns whether there was any."""
    try:
        (folder / _ROOM).unlink()
    except OSError:
        return False
    return True


def make_private_folder(folder: Path) -> None:
    """Make a folder that only this user can enter, and those above it that are missing. An existing one is kept."""
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
    """Open a file that others may have put there, to read it. Never waits, as opening a pipe does.

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
    """JSON files in a folder, by name. A folder that is missing, or cannot be read now, has none."""
    try:
        return sorted(folder.glob("*.json")) if folder.is_dir() else []
    except OSError:
        return []


def read_regular(file: Path, limit: int = LARGEST_TEXT) -> bytes:
    """All of a file that others may have put there.

    Raises:
        OSError: as `open_regular`, or the file has more than `limit` bytes.
    """
    with open_regular(file) as opened:
        data = opened.read(limit + 1) if os.fstat(opened.fileno()).st_size <= limit else None
    if data is None or len(data) > limit:
        raise OSError(errno.EFBIG, f"more than {limit} bytes", str(file))
    return data


def sync_directory(path: Path) -> None:
    """Without this the name of a new file, unlike its bytes, may be lost with the power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
