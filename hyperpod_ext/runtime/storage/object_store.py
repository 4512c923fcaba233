"""What the durable tiers stand on: named blobs that are there whole or not at all.

Two stores keep the same promises, `s3.py` and `file.py`, and one contract test holds them to it.
Blobs go from and into the caller's memory: a store buffers none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hyperpod_ext.errors import ConfigError, Problem

MIB = 1 << 20
PARTIAL = ".partial"
"""How the last part of a name may not end: the file store writes under such names."""


class Cancelled(Exception):  # noqa: N818, no error: it was asked for
    """A put was told to stop. Nothing of it is visible, and nothing of it is left behind."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One blob, as a listing shows it."""

    name: str
    nbytes: int


def never() -> bool:
    """`cancelled` of a put that runs to its end."""
    return False


def ignore(nbytes: int) -> None:
    """`on_bytes` of a transfer that nobody watches."""


class ObjectStore(Protocol):
    """Named blobs in a place that outlives the node: an S3 prefix, a shared directory.

    Names are relative paths with "/" between their parts. Every method may be called from any thread.
    Passing faults (throttling, cut connections) are retried inside; what a method raises is final.
    `cancelled` is looked at between tries, too, and then `Cancelled` is raised: a call that nobody wants any more
    does not go on for as long as the place cannot be reached.

    Raises:
        UnreachableError: the place refuses us, is full or is not there, or kept failing until the deadline.
        CorruptSnapshotError: the bytes are not those that were promised, or not as many.
        ConfigError: a name that leaves the store, or that a store could not keep.
    """

    @property
    def url(self) -> str:
        """s3://bucket/prefix or file:///path, for messages."""

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
        `cancelled` is looked at about once a MiB, and then `Cancelled` is raised.
        A put that gave up at its deadline is resumed by the next one of the same name and bytes.
        `on_bytes` hears of bytes handed over, and of as many negative ones when they must be sent again. One thread
        at a time calls it; it may sleep, which holds every stream back.
        """

    def put_new(self, name: str, data: bytes, *, cancelled: Callable[[], bool] = never) -> bool:
        """Write a small blob if there is none of this name; False when there is. One of many racing writers wins."""

    def get(self, name: str, limit: int = 64 * MIB, *, cancelled: Callable[[], bool] = never) -> bytes:
        """All of a small blob.

        Raises:
            NotFoundError: no blob of this name.
            CorruptSnapshotError: it has more than `limit` bytes.
        """

    def read_into(
        self, name: str, destination: memoryview, offset: int = 0, *, on_bytes: Callable[[int], None] = ignore
    ) -> None:
        """Fill `destination` from byte `offset` on; a blob that ends before is an error.

        What a range holds is not verified here: the checksum in the manifest is over the whole, and the reader's to
        check. After an error `destination` holds anything.

        Raises:
            NotFoundError: no blob of this name.
        """

    def list(self, prefix: str = "", *, cancelled: Callable[[], bool] = never) -> list[Entry]:
        """Every blob whose name starts with `prefix`, sorted by name."""

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Names of the folders right under folder `prefix`, sorted, without the prefix and without slashes."""

    def delete(self, names: Sequence[str], *, cancelled: Callable[[], bool] = never) -> None:
        """Remove blobs; one that is not there is no error."""

    def close(self) -> None:
        """Take back what failed puts left to be resumed. The store itself can be used again."""

    def check(self) -> None:
        """Write, read, list and delete a probe, so that what is wrong with the place shows before training starts."""


class Until:
    """A store whose calls that a `cancelled` can stop are stopped by this one, too."""

    def __init__(self, store: ObjectStore, cancelled: Callable[[], bool]) -> None:
        self._store, self._cancelled = store, cancelled
        self.url = store.url
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


def checked_name(name: str) -> str:
    """`name`, if every store can keep it and it stays inside.

    Raises:
        ConfigError: it is empty, absolute, climbs with "..", or looks like a file store's unfinished file.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in name or parts[-1].endswith(PARTIAL):
        raise ConfigError([Problem(f"{name!r} cannot name a blob", hint="Use a relative path without '..'.")])
    return name


def checked_prefix(prefix: str) -> str:
    """`prefix`, if it stays inside the store; it need not be whole path parts."""
    if prefix.startswith("/") or ".." in prefix.split("/") or "\0" in prefix:
        raise ConfigError([Problem(f"{prefix!r} leaves the store", hint="Use a relative path without '..'.")])
    return prefix
