"""A directory as an object store: on Lustre, NFS, EFS or a local disk.

A blob is written to a file with a temporary name, synced, and then renamed. A crash at any moment leaves the old
blob, the new blob or no blob, but never a part. Temporary files of crashed writers are never listed. A crashed writer's
temporary file is deleted together with its blob, or by `check` after a day.

Other users may be able to write below the directory. For safety, every subfolder is opened relative to the descriptor
of its parent folder, never through a symbolic link, and never across a mount point. A blob must be a regular file.
Files of any other kind are not listed, not read and not deleted.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hyperpod_ext.errors import (
    CorruptSnapshotError,
    HyperpodExtError,
    NotFoundError,
    UnreachableError,
)
from hyperpod_ext.files import sync_directory
from hyperpod_ext.runtime.storage.object_store import (
    DEEPEST,
    MIB,
    PARTIAL,
    Cancelled,
    Entry,
    checked_name,
    checked_prefix,
    ignore,
    is_name,
    never,
    no_place,
    probe,
)
from hyperpod_ext.user_folders import expanded

CHUNK = 8 * MIB
"""Number of bytes between two calls of `cancelled`."""
ABANDONED_S = 24 * 3600.0
"""Seconds without a write after which a temporary file is deleted, because its writer must have crashed."""
HINTS = {
    errno.ENOSPC: "Free space there, keep fewer checkpoints, or choose another place.",
    errno.EDQUOT: "Raise the quota, keep fewer checkpoints, or choose another place.",
    errno.EACCES: "Allow the user of the training processes to read and write there. Checkpoints are readable only by "
    "the user who wrote them, unless the tier has `shared: true`.",
    errno.EPERM: "Allow the user of the training processes to read and write there.",
    errno.EROFS: "Mount it for writing, or choose another place.",
    errno.ESTALE: "Mount the file system again.",
    errno.ENOTDIR: "Remove the file or symbolic link that is in place of a folder.",
    errno.ELOOP: "Remove the symbolic link, folder, pipe or device that is in place of the file.",
    errno.EISDIR: "Remove the folder that is in place of a file there.",
    errno.ENOENT: "Check that the folders above it exist and can be written to, or choose another place.",
    errno.EXDEV: "Another file system is mounted below the place of checkpoints. Unmount it, or choose another place.",
}
_NO_LINKS = {errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EINVAL}
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_UNFINISHED = re.compile(r"\.(.+)\.[0-9a-f]{16}" + re.escape(PARTIAL))
_GONE = (FileNotFoundError, NotADirectoryError)


class FileStore:
    """An object store in a directory.

    Args:
        path: the directory, which is created if needed.
        job: name of the folder in the directory that is the store, and must not be a symbolic link; empty: the
            directory itself is the store.
        shared: whether files and folders get the modes that the umask allows, or are readable only by this user.
    """

    create_only = "hard links, which refuse a name that exists"

    def __init__(self, path: str | Path, job: str = "", *, shared: bool = False) -> None:
        self._place = expanded(path).absolute()
        self._above = (job,) if job else ()
        self._file_mode, self._folder_mode = (0o666, 0o777) if shared else (0o600, 0o700)
        self.root = self._place.joinpath(*self._above)
        self.url = self.root.as_uri()

    @classmethod
    def at(cls, place: str, job: str = "", *, shared: bool = False, **_: object) -> FileStore:
        """Return the store at a path or a file:// URL."""
        url = urlsplit(place)
        if url.scheme and url.netloc not in ("", "localhost"):
            raise no_place(place)
        return cls(unquote(url.path) if url.scheme else place, job, shared=shared)

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

        data = data.cast("B")
        with self._explained("write", name), self._unfinished(name) as (folder, last, partial, descriptor):
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
                    hint="The memory changed after its checksum was computed. Earlier checkpoints are untouched.",
                )
            os.fsync(descriptor)
            if cancelled():
                raise Cancelled(f"{self.url}/{name}")
            os.replace(partial, last, src_dir_fd=folder, dst_dir_fd=folder)  # readers see the complete blob or none
            os.fsync(folder)

    def copy(
        self, source: str, name: str, nbytes: int, crc64nvme: str, *, cancelled: Callable[[], bool] = never
    ) -> bool:
        *parts, original = checked_name(source).split("/")
        checked_name(name)
        self._look(cancelled)
        with self._explained("write", name), self._unfinished(name) as (folder, last, partial, _):
            os.unlink(partial, dir_fd=folder)
            try:
                with self._folder(parts) as origin:
                    os.link(original, partial, src_dir_fd=origin, dst_dir_fd=folder, follow_symlinks=False)
                found = os.stat(partial, dir_fd=folder, follow_symlinks=False)
            except OSError as error:
                if isinstance(error, _GONE) or error.errno in _NO_LINKS | {errno.EXDEV, errno.ELOOP}:
                    return False
                raise
            if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
                return False
            # os.replace does nothing if both names are already links to the same file
            os.replace(partial, last, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
            return True

    def put_new(self, name: str, data: bytes, *, cancelled: Callable[[], bool] = never) -> bool:
        checked_name(name)
        self._look(cancelled)
        with self._explained("write", name), self._unfinished(name) as (folder, last, partial, descriptor):
            _write_all(descriptor, data)
            os.fsync(descriptor)
            try:  # a link, unlike a rename, never replaces an existing file
                os.link(partial, last, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            except FileExistsError:
                with suppress(FileNotFoundError):
                    _check_regular(os.stat(last, dir_fd=folder, follow_symlinks=False))
                return os.fstat(descriptor).st_nlink == 2  # 2 links: a first try succeeded, but NFS lost the answer
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                raise UnreachableError(
                    f"The file system of {self.root} does not make hard links ({error.strerror}). Checkpoints need "
                    "them to create a file only if its name does not exist",
                    hint="Choose a local disk, Lustre, NFS or EFS. For a mounted bucket, write a tier of kind s3.",
                ) from error
            os.fsync(folder)
            return True

    def get(self, name: str, limit: int = 64 * MIB, *, cancelled: Callable[[], bool] = never) -> bytes:
        checked_name(name)
        self._look(cancelled)
        with self._reading(name) as descriptor:
            if os.fstat(descriptor).st_size <= limit:
                with open(descriptor, "rb", closefd=False) as file:
                    data = file.read(limit + 1)
                if len(data) <= limit:
                    return data
        raise CorruptSnapshotError(f"{self.url}/{name} has more than {limit} bytes, the limit for this file")

    def read_into(
        self, name: str, destination: memoryview, offset: int = 0, *, on_bytes: Callable[[int], None] = ignore
    ) -> None:
        destination = destination.cast("B")
        with self._reading(name) as descriptor:
            done = 0
            while done < len(destination):
                read = os.preadv(descriptor, [destination[done : done + CHUNK]], offset + done)
                if not read:
                    raise CorruptSnapshotError(
                        f"{self.url}/{name} ends at byte {offset + done}, {len(destination) - done} bytes too early"
                    )
                done += read
                on_bytes(read)

    def list(self, prefix: str = "", *, cancelled: Callable[[], bool] = never) -> list[Entry]:
        self._look(cancelled)
        parts = checked_prefix(prefix).split("/")[:-1]
        inside, found = "".join(f"{part}/" for part in parts), []
        with self._explained("list", inside), suppress(*_GONE), self._folder(parts) as folder:
            for name, item, _ in _walk(folder, inside):
                if name.startswith(prefix) and is_name(name):
                    with suppress(FileNotFoundError):  # this file was deleted meanwhile
                        found.append(Entry(name, item.stat(follow_symlinks=False).st_size))
        return sorted(found, key=lambda entry: entry.name)

    def folders(self, prefix: str = "") -> Sequence[str]:
        parts = [part for part in checked_prefix(prefix).split("/") if part]
        found: set[str] = set()
        with self._explained("list", prefix), suppress(*_GONE), self._folder(parts) as folder:
            # skip empty folders, which deletions and crashed writers leave, because S3 has only folders with blobs
            for item in [*os.scandir(folder)]:
                if is_name(item.name) and any(is_name(name) for name, _, _ in _below(folder, item, "", DEEPEST)):
                    found.add(item.name)
        return sorted(found)

    def delete(self, names: Sequence[str], *, cancelled: Callable[[], bool] = never) -> None:
        for where, its in itertools.groupby(names, lambda name: checked_name(name).rpartition("/")[0]):
            parts, lasts = where.split("/") if where else [], {name.rpartition("/")[2] for name in its}
            self._look(cancelled)
            with self._explained("delete", where), suppress(*_GONE), self._folder(parts) as folder:
                for last in lasts:
                    self._look(cancelled)
                    _unlink(last, folder)
                for item in os.scandir(folder):  # also delete crashed writers' temporary files
                    if (match := _UNFINISHED.fullmatch(item.name)) and match[1] in lasts:
                        _unlink(item.name, folder)
            while parts:
                part = parts.pop()
                with suppress(OSError), self._folder(parts) as above:  # ignore a folder that is deleted or not empty
                    os.rmdir(part, dir_fd=above)

    def close(self) -> None:
        """Do nothing, because this store keeps no state between calls."""

    def check(self) -> None:
        with self._explained("use", ""):
            self._make_place(self._place)
        with self._explained("use", ""), self._folder((), make=True) as root:
            for _, item, folder in _walk(root, ""):
                if _UNFINISHED.fullmatch(item.name):
                    with suppress(FileNotFoundError):
                        if time.time() - item.stat(follow_symlinks=False).st_mtime > ABANDONED_S:
                            _unlink(item.name, folder)
        probe(self)

    def _look(self, cancelled: Callable[[], bool]) -> None:
        if cancelled():
            raise Cancelled(self.url)

    @contextmanager
    def _folder(self, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
        """Yield the descriptor of a folder of this store.

        Args:
            parts: names of the folder and its parents, starting below the store's root.
            make: whether to create missing folders.

        Raises:
            OSError: the folder is missing, or one of `parts` is a file, a symbolic link or a mount point.
        """
        folder = os.open(self._place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in self._above:
                try:
                    folder = self._enter(folder, part, make)
                except NotADirectoryError:
                    raise UnreachableError(
                        f"{self.root} is a symbolic link or a file, not a folder", hint="Remove it, or use its target."
                    ) from None
            mount = _mount_of(folder)
            for part in parts:
                folder = self._enter(folder, part, make)
                if _mount_of(folder) != mount:
                    raise OSError(errno.EXDEV, "another file system is mounted there")
            yield folder
        finally:
            os.close(folder)

    def _enter(self, above: int, part: str, make: bool) -> int:
        """Open the folder `part` in the open folder `above`, and close `above`. Returns the new descriptor."""
        try:
            inner = os.open(part, _FOLDER, dir_fd=above)
        except FileNotFoundError:
            if not make:
                raise
            with suppress(FileExistsError):
                os.mkdir(part, self._folder_mode, dir_fd=above)
                os.fsync(above)
            inner = os.open(part, _FOLDER, dir_fd=above)
        os.close(above)
        return inner

    def _make_place(self, path: Path) -> None:
        if not path.exists():
            self._make_place(path.parent)
            path.mkdir(self._folder_mode, exist_ok=True)
            sync_directory(path.parent)

    @contextmanager
    def _reading(self, name: str) -> Iterator[int]:
        *parts, last = checked_name(name).split("/")
        with self._explained("read", name), self._folder(parts) as folder:
            _check_regular(os.stat(last, dir_fd=folder, follow_symlinks=False))
            descriptor = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            try:
                _check_regular(os.fstat(descriptor))  # check again: the file may have been replaced
                yield descriptor
            finally:
                os.close(descriptor)

    @contextmanager
    def _unfinished(self, name: str) -> Iterator[tuple[int, str, str, int]]:
        """Create a temporary file next to `name`, which readers ignore, and delete it at the end unless it was renamed.

        Yields:
            The descriptor of the folder, the last part of `name`, the name of the temporary file, and its descriptor.
        """
        *parts, last = checked_name(name).split("/")
        partial = f".{last}.{secrets.token_hex(8)}{PARTIAL}"
        self._make_place(self._place)
        with ExitStack() as stack:
            for _ in range(10):  # retry if another process deletes the empty folder between these calls
                with suppress(FileNotFoundError):
                    folder = stack.enter_context(self._folder(parts, make=True))
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                    descriptor = os.open(partial, flags, self._file_mode, dir_fd=folder)
                    break
            else:
                raise HyperpodExtError(
                    f"another process deleted {self.root}/{'/'.join(parts)} each time that a file was created in it",
                    hint="Stop the process that deletes folders there, or choose another place.",
                )
            stack.callback(_unlink, partial, folder)
            stack.callback(os.close, descriptor)
            yield folder, last, partial, descriptor

    @contextmanager
    def _explained(self, doing: str, name: str) -> Iterator[None]:
        path = self.root / name
        try:
            yield
        except OSError as error:
            if doing == "read" and isinstance(error, _GONE):
                raise NotFoundError(f"There is no {path}") from None
            if doing == "read" and error.errno == errno.ELOOP:
                raise NotFoundError(f"{path} is not a regular file", hint=HINTS[errno.ELOOP]) from None
            hint = HINTS.get(error.errno or 0, "The log of the file system may show why.")
            raise UnreachableError(f"Cannot {doing} {path}: {error.strerror or error}", hint=hint) from error


def _walk(folder: int, inside: str, depth: int = DEEPEST) -> Iterator[tuple[str, os.DirEntry[str], int]]:
    """Yield each regular file below an open folder: its name, its directory entry, and its folder's descriptor.

    Symbolic links and other mounted file systems are left out. Other nodes may delete folders at the same time.

    Args:
        folder: descriptor of the open folder.
        inside: prefix for the names of the files.
        depth: maximum number of folder levels.
    """
    for item in [*os.scandir(folder)]:
        if item.is_file(follow_symlinks=False):
            yield f"{inside}{item.name}", item, folder
        elif depth > 1:
            yield from _below(folder, item, inside, depth)


def _below(folder: int, item: os.DirEntry[str], inside: str, depth: int) -> Iterator[tuple[str, os.DirEntry[str], int]]:
    """Yield the files below `item`, an entry of the open folder `folder`, as `_walk` does; none if it is no folder."""
    if not item.is_dir(follow_symlinks=False):
        return
    try:
        inner = os.open(item.name, _FOLDER, dir_fd=folder)
    except _GONE:
        return
    try:
        if _mount_of(inner) == _mount_of(folder):
            yield from _walk(inner, f"{inside}{item.name}/", depth - 1)
    finally:
        os.close(inner)


def _mount_of(descriptor: int) -> tuple[int, str]:
    """Return the identity of the file system of an open folder: device number and mount ID."""
    with suppress(FileNotFoundError), Path(f"/proc/self/fdinfo/{descriptor}").open() as lines:
        return os.fstat(descriptor).st_dev, next((line for line in lines if line.startswith("mnt_id:")), "")
    return os.fstat(descriptor).st_dev, ""


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.ELOOP, "not a regular file")


def _unlink(name: str, folder: int) -> None:
    with suppress(FileNotFoundError, IsADirectoryError):
        os.unlink(name, dir_fd=folder)


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
