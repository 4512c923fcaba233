"""A directory as an object store: Lustre, NFS, EFS or a local disk.

A blob is written under another name, synced, then given its name: a crash at any moment leaves the old blob, the new
one or none. What a crash left unfinished is never listed; deleting its blob takes it away, and so does `check` after a
day.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hyperpod_ext.errors import CorruptSnapshotError, HyperpodExtError, NotFoundError, UnreachableError
from hyperpod_ext.files import sync_directory
from hyperpod_ext.runtime.storage.object_store import (
    MIB,
    PARTIAL,
    Cancelled,
    Entry,
    checked_name,
    checked_prefix,
    ignore,
    never,
)
from hyperpod_ext.user_folders import expanded

CHUNK = 8 * MIB  # between two looks at `cancelled`
ABANDONED_S = 24 * 3600.0  # no live writer leaves its file untouched for so long
HINTS = {
    errno.ENOSPC: "Free space there, keep fewer checkpoints, or choose another place.",
    errno.EDQUOT: "Raise the quota, keep fewer checkpoints, or choose another place.",
    errno.EACCES: "Let the user that training runs as read and write there.",
    errno.EPERM: "Let the user that training runs as read and write there; the file system must allow hard links.",
    errno.EROFS: "Mount it for writing, or choose another place.",
    errno.ESTALE: "Mount the file system again.",
}


class FileStore:
    def __init__(self, path: str | Path) -> None:
        self.root = expanded(path).absolute()
        self.url = self.root.as_uri()

    def put(
        self,
        name: str,
        data: memoryview,
        crc64nvme: str,
        *,
        cancelled: Callable[[], bool] = never,
        on_bytes: Callable[[int], None] = ignore,
    ) -> None:
        from awscrt import checksums

        final = self._path(name)
        data = data.cast("B")
        with self._explained("write", final), self._unfinished(final) as (partial, descriptor):
            crc = done = 0
            while done < len(data):
                if cancelled():
                    raise Cancelled(f"{self.url}/{name}")
                written = os.write(descriptor, data[done : done + CHUNK])
                crc = checksums.crc64nvme(data[done : done + written], crc)
                done += written
                on_bytes(written)
            if f"{crc:016x}" != crc64nvme.lower():
                raise CorruptSnapshotError(
                    f"{self.url}/{name} was not written: CRC64-NVME of its bytes is {crc:016x}, not {crc64nvme}",
                    hint="The memory changed after it was sealed; earlier checkpoints are untouched.",
                )
            os.fsync(descriptor)
            if cancelled():
                raise Cancelled(f"{self.url}/{name}")
            partial.replace(final)  # readers see all of it or none of it
            sync_directory(final.parent)

    def put_new(self, name: str, data: bytes, *, cancelled: Callable[[], bool] = never) -> bool:
        final = self._path(name)
        self._look(cancelled)
        with self._explained("write", final), self._unfinished(final) as (partial, descriptor):
            _write_all(descriptor, data)
            os.fsync(descriptor)
            try:
                final.hardlink_to(partial)  # unlike rename, refuses a name that is taken
            except FileExistsError:
                return partial.stat().st_nlink == 2  # an NFS server whose answer got lost: the link is ours
            sync_directory(final.parent)
            return True

    def get(self, name: str, limit: int = 64 * MIB, *, cancelled: Callable[[], bool] = never) -> bytes:
        path = self._path(name)
        self._look(cancelled)
        with self._explained("read", path), path.open("rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise CorruptSnapshotError(f"{self.url}/{name} has more than the {limit} bytes it may have")
        return data

    def read_into(
        self, name: str, destination: memoryview, offset: int = 0, *, on_bytes: Callable[[int], None] = ignore
    ) -> None:
        path = self._path(name)
        destination = destination.cast("B")
        with self._explained("read", path), path.open("rb", buffering=0) as file:
            done = 0
            while done < len(destination):
                read = os.preadv(file.fileno(), [destination[done : done + CHUNK]], offset + done)
                if not read:
                    raise CorruptSnapshotError(
                        f"{self.url}/{name} ends at byte {offset + done}, {len(destination) - done} too early"
                    )
                done += read
                on_bytes(read)

    def list(self, prefix: str = "", *, cancelled: Callable[[], bool] = never) -> list[Entry]:
        self._look(cancelled)
        folder = checked_prefix(prefix).rpartition("/")[0]
        with self._explained("list", self.root / folder):
            found = (entry for entry in self._walk(self.root / folder) if entry.name.startswith(prefix))
            return sorted(found, key=lambda entry: entry.name)

    def folders(self, prefix: str = "") -> Sequence[str]:
        folder = self.root / checked_prefix(prefix)
        with self._explained("list", folder):
            try:
                inside = [path for path in folder.iterdir() if path.is_dir()]
            except (FileNotFoundError, NotADirectoryError):
                return []
            # a folder is where blobs are: what deleting and dying writers leave is none, on S3 as here
            return sorted(path.name for path in inside if any(self._walk(path)))

    def delete(self, names: Sequence[str], *, cancelled: Callable[[], bool] = never) -> None:
        for name in names:
            self._look(cancelled)
            path = self._path(name)
            with self._explained("delete", path):
                path.unlink(missing_ok=True)
                self._drop_unfinished(path)
                for parent in path.parents:
                    if parent == self.root:
                        break
                    with suppress(OSError):  # not empty, or another has it
                        parent.rmdir()

    def close(self) -> None:
        """Nothing is kept between calls."""

    def check(self) -> None:
        probe = f".check-{secrets.token_hex(8)}"
        with self._explained("use", self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            for path in self._partials():
                with suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime > ABANDONED_S:
                        path.unlink()
        try:
            works = self.put_new(probe, b"probe") and self.get(probe) == b"probe"
            if not works or probe not in {entry.name for entry in self.list(probe)}:
                raise UnreachableError(f"{self.url} does not give back what was written to it")
        finally:
            self.delete([probe])

    def _look(self, cancelled: Callable[[], bool]) -> None:
        if cancelled():
            raise Cancelled(self.url)

    def _path(self, name: str) -> Path:
        return self.root / checked_name(name)

    def _partials(self) -> Iterator[Path]:
        """Files that were not finished. Other nodes may remove folders meanwhile, which ends `Path.rglob`."""
        for folder, _, names in os.walk(self.root):
            yield from (Path(folder, name) for name in names if name.startswith(".") and name.endswith(PARTIAL))

    def _walk(self, folder: Path) -> Iterator[Entry]:
        try:
            inside = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        for item in inside:
            if item.is_dir():
                yield from self._walk(Path(item.path))
            elif not item.name.endswith(PARTIAL):
                with suppress(FileNotFoundError):  # deleted since
                    yield Entry(str(Path(item.path).relative_to(self.root)), item.stat().st_size)

    @contextmanager
    def _unfinished(self, final: Path) -> Iterator[tuple[Path, int]]:
        """A file beside `final` under a name that no reader looks at; gone at the end unless it was renamed."""
        partial = final.with_name(f".{final.name}.{secrets.token_hex(8)}{PARTIAL}")
        descriptor = _create(partial)
        try:
            yield partial, descriptor
        finally:
            os.close(descriptor)
            partial.unlink(missing_ok=True)

    def _drop_unfinished(self, final: Path) -> None:
        """Remove what writers of a deleted blob left when they died; one still writing fails and is told so."""
        prefix = f".{final.name}."
        with suppress(FileNotFoundError):
            for item in os.scandir(final.parent):
                if item.name.startswith(prefix) and item.name.endswith(PARTIAL):
                    Path(item.path).unlink(missing_ok=True)

    @contextmanager
    def _explained(self, doing: str, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if doing == "read" and isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
                raise NotFoundError(f"There is no {path}") from None
            hint = HINTS.get(error.errno or 0, "See the file system's own log.")
            raise UnreachableError(f"Cannot {doing} {path}: {error.strerror or error}", hint=hint) from error


def _create(path: Path) -> int:
    for _ in range(10):  # a delete may take the folder between the two calls
        _make_folder(path.parent)
        with suppress(FileNotFoundError):
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    raise HyperpodExtError(f"{path.parent} is removed again each time it is made")


def _make_folder(path: Path) -> None:
    if not path.exists():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
