"""What the durable tiers stand on: named blobs that are there whole or not at all.

Two stores keep the same promises, `s3.py` and `file.py`, and one contract test holds them to it.
Blobs go from and into the caller's memory: a store buffers none of them.
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
"""How the last part of a name may not end: the file store writes under such names."""
DEEPEST = 8
"""Parts of a name, at most."""


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
        """Write, read, list and delete a probe, so that what is wrong with the place shows before training starts.

        Raises:
            UnreachableError: with the capability that the place lacks; see `probe`.
        """


class Until:
    """A store whose calls that a `cancelled` can stop are stopped by this one, too."""

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
    """Try each capability that checkpoints rely on, with a blob that is deleted again.

    Raises:
        UnreachableError: a call failed, or had no effect; the message names the capability.
    """
    # in the folder that is needed first, and that a link or a file may be in place of
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
    """The error for a URL that no store has."""
    hint = "Write s3://bucket/prefix, file:///path or a path."
    return ConfigError([Problem(f"{url!r} is no place for checkpoints", hint=hint)])


def is_name(name: str) -> bool:
    """Whether every store can keep a blob of this name, and a terminal can show it: a relative path without "..",
    without control characters, at most `DEEPEST` parts deep, that is not the name of an unfinished file."""
    parts = name.split("/")
    inside = not any(part in ("", ".", "..") for part in parts) and len(parts) <= DEEPEST
    return inside and name.isprintable() and not parts[-1].endswith(PARTIAL)


def checked_name(name: str) -> str:
    """`name`, if `is_name`.

    Raises:
        ConfigError: it is empty, absolute, climbs with "..", has control characters, is too deep, or looks like a file
            store's unfinished file.
    """
    if not is_name(name):
        raise ConfigError([Problem(f"{name!r} cannot name a blob", hint="Use a relative path without '..'.")])
    return name


def checked_prefix(prefix: str) -> str:
    """`prefix`, if it stays inside the store; it need not be whole path parts."""
    if prefix.startswith("/") or ".." in prefix.split("/") or "\0" in prefix:
        raise ConfigError([Problem(f"{prefix!r} leaves the store", hint="Use a relative path without '..'.")])
    return prefix
