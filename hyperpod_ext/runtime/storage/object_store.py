"""Interface of the durable tiers' stores: named blobs, which exist completely or not at all.

`s3.py` and `file.py` implement it; one contract test checks both.

Blobs are sent from and received into the caller's memory: a store buffers none of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from hyperpod_ext.errors import ConfigError, HyperpodExtError, Problem, UnreachableError
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme, crc_text

MIB = 1 << 20
PARTIAL = ".partial"
"""Suffix that names may not have: the file store uses it for unfinished files."""
DEEPEST = 8
"""Maximum number of parts in a name."""


class Cancelled(Exception):  # noqa: N818, no error: the caller asked for it
    """The caller stopped a call. A stopped put leaves nothing visible and nothing to clean up."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One blob of a listing."""

    name: str
    nbytes: int


def never() -> bool:
    """Return False: the default `cancelled`."""
    return False


def ignore(nbytes: int) -> None:
    """Do nothing: the default `on_bytes`."""


class ObjectStore(Protocol):
    """Named blobs in a place that outlives the node: an S3 prefix, a shared directory.

    Names are relative paths with "/" between their parts. Every method may be called from any thread.
        Transient faults (throttling, cut connections) are retried inside; errors that a method raises are final.

    `cancelled` is checked between tries, too, and raises `Cancelled`: a cancelled call does not go on retrying while
    the store is unreachable.

    Raises:
        UnreachableError: the store denied access, is full or missing, or kept failing until the deadline.
        CorruptSnapshotError: the bytes do not match their checksum or length.
        ConfigError: a name that leaves the store, or that a store could not keep.
    """

    @property
    def url(self) -> str:
        """s3://bucket/prefix or file:///path, for messages."""

    @property
    def create_only(self) -> str:
        """Name of the capability that `put_new` relies on, for messages."""

    def put(
        self,
        name: str,
        data: memoryview,
        crc64nvme: str,
        *,
        cancelled: Callable[[], bool] = never,
        on_bytes: Callable[[int], None] = ignore,
    ) -> None:
        """Write or replace a blob; readers see the old one, none or the new one, never a part.

        `crc64nvme` is 16 hex digits of all of `data`, as the snapshot's manifest has it: bytes that do not match it
        never become visible. `data` must stay as it is until this returns or raises.
        `cancelled` is checked about once a MiB, and raises `Cancelled`.
                The next put of the same name and bytes resumes one that gave up at its deadline.

        `on_bytes` gets the number of bytes sent, and the negative number when bytes must be sent again. One thread at
        a time calls it; it may sleep, which slows down every stream.
        """

    def copy(
        self, source: str, name: str, nbytes: int, crc64nvme: str, *, cancelled: Callable[[], bool] = never
    ) -> bool:
        """Write or replace a blob with the bytes of another one, which are not sent; it stays if `source` is deleted.

        Returns False if `source` does not have these bytes (a directory compares the length only), or the store cannot
        copy it; then `put` must write the blob.
        """

    def put_new(self, name: str, data: bytes, *, cancelled: Callable[[], bool] = never) -> bool:
        """Write a small blob; return False if the name exists. Exactly one of several racing writers succeeds."""

    def get(self, name: str, limit: int = 64 * MIB, *, cancelled: Callable[[], bool] = never) -> bytes:
        """Return a small blob.

        Raises:
            NotFoundError: no blob of this name.
            CorruptSnapshotError: the blob has more than `limit` bytes.
        """

    def read_into(
        self, name: str, destination: memoryview, offset: int = 0, *, on_bytes: Callable[[int], None] = ignore
    ) -> None:
        """Fill `destination` from byte `offset` on; a blob that ends before is an error.

        A range is not verified here: the reader checks the manifest's checksum, which is of the whole blob. After an
        error the content of `destination` is undefined.

        Raises:
            NotFoundError: no blob of this name.
        """

    def list(self, prefix: str = "", *, cancelled: Callable[[], bool] = never) -> list[Entry]:
        """Return every blob with a name that starts with `prefix`, sorted by name."""

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Return the names of the folders directly under folder `prefix`, sorted, without prefix and slashes."""

    def delete(self, names: Sequence[str], *, cancelled: Callable[[], bool] = never) -> None:
        """Remove blobs; missing blobs are no error."""

    def close(self) -> None:
        """Remove the resumable parts of failed puts. The store can still be used."""

    def check(self) -> None:
        """Write, read, list and delete a probe, to find a store's faults before training starts.

        Raises:
            UnreachableError: the store lacks the named capability; see `probe`.
        """


class Until:
    """A store with one more `cancelled`, which is checked in every call."""

    def __init__(self, store: ObjectStore, cancelled: Callable[[], bool]) -> None:
        self._store, self._cancelled = store, cancelled
        self.url, self.create_only = store.url, store.create_only
        self.read_into, self.folders, self.close, self.check = store.read_into, store.folders, store.close, store.check

    def put(
        self,
        name: str,
        data: memoryview,
        crc64nvme: str,
        *,
        cancelled: Callable[[], bool] = never,
        on_bytes: Callable[[int], None] = ignore,
    ) -> None:
        self._store.put(name, data, crc64nvme, cancelled=self._either(cancelled), on_bytes=on_bytes)

    def copy(
        self, source: str, name: str, nbytes: int, crc64nvme: str, *, cancelled: Callable[[], bool] = never
    ) -> bool:
        return self._store.copy(source, name, nbytes, crc64nvme, cancelled=self._either(cancelled))

    def put_new(self, name: str, data: bytes, *, cancelled: Callable[[], bool] = never) -> bool:
        return self._store.put_new(name, data, cancelled=self._either(cancelled))

    def get(self, name: str, limit: int = 64 * MIB, *, cancelled: Callable[[], bool] = never) -> bytes:
        return self._store.get(name, limit, cancelled=self._either(cancelled))

    def list(self, prefix: str = "", *, cancelled: Callable[[], bool] = never) -> list[Entry]:
        return self._store.list(prefix, cancelled=self._either(cancelled))

    def delete(self, names: Sequence[str], *, cancelled: Callable[[], bool] = never) -> None:
        self._store.delete(names, cancelled=self._either(cancelled))

    def _either(self, cancelled: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: cancelled() or self._cancelled()


def probe(store: ObjectStore) -> None:
    """Test each capability that checkpoints rely on, with a temporary blob.

    Raises:
        UnreachableError: a call failed, or had no effect; the message names the capability.
    """
    # in the folder that is needed first: a link or a file may be in its place
    name, blobs, made = f"generations/.check-{secrets.token_hex(8)}", (b"first", b"second", b"third"), False

    def need(works: bool, lacks: str) -> None:
        if not works:
            raise UnreachableError(
                f"{store.url} {lacks}; checkpoints rely on that", hint="Choose a place that does, or upgrade the store."
            )

    try:
        made = store.put_new(name, blobs[0])
        need(made, "refuses to create a blob of a new name")
        again = store.put_new(name, blobs[1])
        need(not again and store.get(name) == blobs[0], f"replaces a blob that exists, despite {store.create_only}")
        store.put(name, memoryview(blobs[2]), crc_text(crc64nvme(blobs[2])))
        store.read_into(name, memoryview(part := bytearray(2)), 1)
        need(part == blobs[2][1:3], "does not return what was written to it")
        need(name in {entry.name for entry in store.list(name)}, "does not list what was written to it")
        store.delete([name])
        need(not store.list(name), "lists what was deleted from it")
    except HyperpodExtError:
        if made:
            with suppress(HyperpodExtError):
                store.delete([name])
        raise


def no_place(url: str) -> ConfigError:
    """Return the error for a URL that no store supports."""
    hint = "Write s3://bucket/prefix, file:///path or a path."
    return ConfigError([Problem(f"{url!r} is no place for checkpoints", hint=hint)])


def is_name(name: str) -> bool:
    """Return whether every store can keep a blob of this name, and a terminal can show it.

    Valid names are relative paths of at most `DEEPEST` parts, without "..", control characters and suffix `PARTIAL`.
    """
    parts = name.split("/")
    inside = not any(part in ("", ".", "..") for part in parts) and len(parts) <= DEEPEST
    return inside and name.isprintable() and not parts[-1].endswith(PARTIAL)


def checked_name(name: str) -> str:
    """Return `name`.

    Raises:
        ConfigError: not `is_name`.
    """
    if not is_name(name):
        raise ConfigError([Problem(f"{name!r} cannot name a blob", hint="Use a relative path without '..'.")])
    return name


def checked_prefix(prefix: str) -> str:
    """Return `prefix`, which must stay inside the store; its last path part may be incomplete."""
    if prefix.startswith("/") or ".." in prefix.split("/") or "\0" in prefix:
        raise ConfigError([Problem(f"{prefix!r} leaves the store", hint="Use a relative path without '..'.")])
    return prefix
