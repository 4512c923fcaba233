"""Functions to publish files atomically, and file locks that the kernel releases when the holder dies.

Readers need no lock, because a file is written under a temporary name, synced, and then renamed. If a writer is killed,
the next writer of the same folder removes its temporary files. Space is reserved before the first byte is written, so a
full disk or tmpfs raises an error in the writer and never causes SIGBUS in a mapping.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hyperpod_ext.errors import CorruptSegmentError, DiskFullError, HyperpodExtError
from hyperpod_ext.files import sync_directory

TEMPORARY = ".tmp"
Bytes = bytes | bytearray | memoryview
_CHUNK = 16 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_LIMIT = 64 << 20
_RETRY_S = 0.01


def publish(final: Path, parts: Sequence[Bytes]) -> int:
    """Write the consecutive `parts` to the file `final` atomically. Returns the size of the file in bytes.

    Raises:
        DiskFullError: the disk has no space left. The partial file was removed.
    """
    views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
    nbytes = sum(len(view) for view in views)
    partial = final.with_name(f".{final.name}.{secrets.token_hex(4)}{TEMPORARY}")
    with explained(final, nbytes):
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            if nbytes:
                os.posix_fallocate(descriptor, 0, nbytes)
            for view in views:
                while view:
                    view = view[os.write(descriptor, view[:_CHUNK]) :]
            os.fsync(descriptor)
            partial.rename(final)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        sync_directory(final.parent)
    return nbytes


def publish_json(final: Path, document: object) -> None:
    """Write a small document to a JSON file atomically."""
    publish(final, [json.dumps(document, indent=1).encode() + b"\n"])


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the contents of a file that `publish_json` has written; None if the file does not exist.

    Raises:
        CorruptSegmentError: the file is not a JSON object.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_LIMIT)
        found = json.loads(text)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise CorruptSegmentError(f"{path}: not JSON ({error})", hint=rebuild_hint(path.parent)) from None
    if not isinstance(found, dict):
        raise CorruptSegmentError(f"{path}: not a JSON object", hint=rebuild_hint(path.parent))
    return found


def rebuild_hint(folder: Path) -> str:
    """Return the hint for an error about a damaged token store."""
    return (
        f"`hp-ext data verify {folder} --drop-damaged` removes damaged segments; "
        "then run `hp-ext data build` again with the same arguments"
    )


def sweep(folder: Path) -> int:
    """Remove the temporary files of killed writers, and return their number. The caller must hold the writer's lock."""
    left = list(folder.glob(f".*{TEMPORARY}"))
    for path in left:
        path.unlink(missing_ok=True)
    return len(left)


def make_folder(path: Path) -> None:
    """Make a folder and its parent folders.

    Raises:
        HyperpodExtError: the folder cannot be made.
    """
    with explained(path):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def explained(path: Path, nbytes: int = 0) -> Iterator[None]:
    """Convert an OSError inside the `with` block to an error with the file's name and a hint. `nbytes`: size of the
    file to write, if known."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            size = f" ({nbytes:,} bytes)" if nbytes else ""
            raise DiskFullError(
                f"{path}{size} was not written: {error.strerror}",
                hint="Earlier segments stay, and the next run continues after them. Free space, use `--budget` to have "
                "old stores evicted, or choose another place with `--out`.",
            ) from error
        raise HyperpodExtError(
            f"{path} cannot be written: {error.strerror or error}", hint="choose another place"
        ) from error


class FileLock:
    """A lock by `flock` on one file. The kernel releases the lock when the holding process dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._owner = 0

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def fileno(self) -> int:
        """Return the file descriptor of the locked file, to pass it to a child process. The lock lasts until the parent
        and the child process have closed the file."""
        if self._descriptor is None:
            raise ValueError(f"{self.path} is not locked")
        return self._descriptor

    def acquire(self, *, wait: bool = False, shared: bool = False, timeout_s: float = 0.0) -> bool:
        """Try to get the lock for `timeout_s` seconds, or without a limit if `wait`. Returns whether the lock is held.

        `shared`: whether several processes may hold the lock at once. The lock file's folder must exist."""
        deadline = time.monotonic() + timeout_s
        how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        while True:
            with explained(self.path):
                descriptor = _open_lock(self.path, shared)
            try:
                fcntl.flock(descriptor, how)
            except BlockingIOError:
                os.close(descriptor)
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_RETRY_S)
                continue
            except OSError as error:
                os.close(descriptor)
                raise HyperpodExtError(
                    f"{self.path} cannot be locked ({error.strerror})", hint="Choose a place on a local disk."
                ) from error
            if _is_at(descriptor, self.path):
                self._descriptor, self._owner = descriptor, 0 if shared else os.getpid()
                return True
            os.close(descriptor)  # the folder was evicted and made again: lock the new file

    def adopt(self, descriptor: int) -> None:
        """Take over a lock from the parent process. `descriptor`: the inherited file descriptor of the lock file."""
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock, if it is held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            if self._owner == os.getpid():  # a forked child, which has the file open too, must not unlock it
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()


def _open_lock(path: Path, shared: bool) -> int:
    if shared:  # open read-only, because a reader may lack write permission
        with suppress(FileNotFoundError):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
