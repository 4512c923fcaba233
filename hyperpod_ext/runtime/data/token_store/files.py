"""Files that are there whole or not at all, and locks that the kernel takes back from the dead.

Readers need no lock: a file is written under a name that nobody looks at, synced, then renamed. What a killed writer
left has that other name, and is swept by the next one. Space is reserved before the first byte, so that a full disk or
tmpfs is an error here and never a SIGBUS in somebody's mapping.
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
    """Write `parts` one after the other as `final`, which others see whole or not at all; gives its bytes.

    Raises:
        DiskFullError: there is no room; nothing is left of it.
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
    """`publish` for a small document."""
    publish(final, [json.dumps(document, indent=1).encode() + b"\n"])


def read_json(path: Path) -> dict[str, Any] | None:
    """What `publish_json` wrote; None if it is not there.

    Raises:
        CorruptSegmentError: it is something else.
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
    """What to do about a damaged store."""
    return (
        f"`hp-ext data verify {folder} --drop-damaged` removes what is damaged; "
        "then `hp-ext data build`, as it was built, writes it again"
    )


def sweep(folder: Path) -> int:
    """Remove what killed writers left; only for whoever holds the lock. Gives how many files."""
    left = list(folder.glob(f".*{TEMPORARY}"))
    for path in left:
        path.unlink(missing_ok=True)
    return len(left)


def make_folder(path: Path) -> None:
    """With its parents.

    Raises:
        HyperpodExtError: it cannot be made.
    """
    with explained(path):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def explained(path: Path, nbytes: int = 0) -> Iterator[None]:
    """The file system's refusals as errors that name the file and say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            need = f": {nbytes:,} bytes are needed" if nbytes else ""
            raise DiskFullError(
                f"{path} was not written{need}, and there is no room ({error.strerror})",
                hint="What was written before is whole, and is gone on from. Free space there, give `--budget` to have "
                "old stores evicted, or choose another place with `--out`.",
            ) from error
        raise HyperpodExtError(f"{path}: {error.strerror or error}", hint="choose another place") from error


class FileLock:
    """`flock` on one file: the kernel lets go of it when its holder dies, however it dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._owner = 0

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def fileno(self) -> int:
        """The locked file, to hand to a child: the lock is held as long as either has it open."""
        if self._descriptor is None:
            raise ValueError(f"{self.path} is not locked")
        return self._descriptor

    def acquire(self, *, wait: bool = False, shared: bool = False, timeout_s: float = 0.0) -> bool:
        """Whether it is ours now, or within `timeout_s`; with `wait`, when it is. The folder must be there."""
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
            os.close(descriptor)  # evicted while we waited; the store's place is free again

    def adopt(self, descriptor: int) -> None:
        """Hold a lock that a parent took and handed over."""
        self._descriptor = descriptor

    def release(self) -> None:
        """Let go; again does no harm."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            if self._owner == os.getpid():  # a child that was forked meanwhile holds it no longer, nor can it let go
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()


def _open_lock(path: Path, shared: bool) -> int:
    if shared:  # a reader may have no right to write
        with suppress(FileNotFoundError):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
