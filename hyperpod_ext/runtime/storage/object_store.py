"""Interface of the object stores of durable tiers. A store has named blobs, which exist completely or not at all.

`s3.py` and `file.py` implement this interface, and the same contract test checks both modules.

A store sends a blob directly from the caller's memory and receives it directly into the caller's memory, without a
buffer of its own.
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
"""Suffix that names of blobs may not have, because the file store uses it for unfinished files."""
DEEPEST = 8
"""Maximum number of parts in the name of a blob."""


class Cancelled(Exception):  # noqa: N818, not named an error, because the caller has requested it
    """The caller has cancelled a call. A cancelled `put` leaves no visible blob and nothing to clean up."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One blob in a listing."""

    name: str
    nbytes: int


def never() -> bool:
    """Return False. This function is the default of the argument `cancelled`."""
    return False


def ignore(nbytes: int) -> None:
    """Do nothing. This function is the default of the argument `on_bytes`."""


class ObjectStore(Protocol):
    """Named blobs in storage that outlives the node, such as an S3 prefix or a shared directory.

    Names are relative paths with "/" between their parts. Every method may be called from any thread. A method retries
    transient faults (throttling, broken connections) itself, so the errors that it raises are final.

    A method calls its argument `cancelled` repeatedly, also between retries, and raises `Cancelled` once `cancelled()`
    is true. A cancelled call therefore ends even if the store is unreachable.

    Raises:
        UnreachableError: the store denied access, is full or missing, or kept failing until the deadline.
        CorruptSnapshotError: the bytes do not match their checksum or length.
        ConfigError: the name of a blob leads outside of the store, or is not possible in every store.
    """

    @property
    def url(self) -> str:
        """URL of the store for messages: s3://bucket/prefix or file:///path."""

    @property
    def create_only(self) -> str:
        """Name of the store's capability that `put_new` relies on, for messages."""

    def put(
        self,
        name: str,
        data: memoryview,
        crc64nvme: str,
        *,
        cancelled: Callable[[], bool] = never,
        on_bytes: Callable[[int], None] = ignore,
    ) -> None:
        """Write or replace a blob. Readers see the old blob, the new blob or no blob, but never a part of a blob.

        If a `put` fails at its deadline, the next `put` of the same name and bytes resumes it.

        Args:
            name: name of the blob.
            data: bytes of the blob, which must not change before this method returns or raises.
            crc64nvme: the CRC64-NVME of `data` as 16 hex digits, as in the snapshot's manifest; bytes that do not match
                this checksum never become visible.
            cancelled: called about once per MiB.
            on_bytes: called by one thread at a time with the number of bytes sent, and with a negative number if bytes
                must be sent again; this function may sleep, which slows down all parallel streams of the call.
        """

    def copy(
        self, source: str, name: str, nbytes: int, crc64nvme: str, *, cancelled: Callable[[], bool] = never
    ) -> bool:
        """Write or replace a blob with the bytes of the blob `source`, without sending them.

        The new blob stays if `source` is deleted later.

        Args:
            source: name of the blob to copy.
            name: name of the new blob.
            nbytes: expected size of `source`.
            crc64nvme: expected CRC64-NVME of `source` as 16 hex digits; a store in a directory compares only the size.
            cancelled: called repeatedly; if it returns True, the call raises `Cancelled`.

        Returns:
            Returns False if `source` is missing or has another size or checksum, or if the store cannot copy. If the
            result is False, the caller must write the blob with `put`.
        """

    def put_new(self, name: str, data: bytes, *, cancelled: Callable[[], bool] = never) -> bool:
        """Write a small blob, or return False if there is a blob of this name.

        If several writers call this method at the same time, exactly one of them succeeds.
        """

    def get(self, name: str, limit: int = 64 * MIB, *, cancelled: Callable[[], bool] = never) -> bytes:
        """Return the bytes of a small blob.

        Raises:
            NotFoundError: there is no blob of this name.
            CorruptSnapshotError: the blob has more than `limit` bytes.
        """

    def read_into(
        self, name: str, destination: memoryview, offset: int = 0, *, on_bytes: Callable[[int], None] = ignore
    ) -> None:
        """Fill `destination` with the bytes of a blob, from byte `offset` on.

        The bytes are not verified here: the caller must check the manifest's checksum, which covers the whole blob.
        After an error, the content of `destination` is undefined.

        Raises:
            NotFoundError: there is no blob of this name.
            CorruptSnapshotError: the blob ends before `destination` is full.
        """

    def list(self, prefix: str = "", *, cancelled: Callable[[], bool] = never) -> list[Entry]:
        """Return all blobs whose names start with `prefix`, sorted by name."""

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Return the names of the folders directly in the folder `prefix`, sorted, without prefix and slashes."""

    def delete(self, names: Sequence[str], *, cancelled: Callable[[], bool] = never) -> None:
        """Delete blobs. Deleting a missing blob is no error."""

    def close(self) -> None:
        """Delete the parts of failed puts that were kept for the next attempt. The store stays usable."""

    def check(self) -> None:
        """Write, read, list and delete a test blob, to find faults of the store before training starts.

        Raises:
            UnreachableError: the store lacks a capability, which the message names; see `probe`.
        """


class Until:
    """A store whose calls are also cancelled when the function `cancelled` of this object returns True."""

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
    """Test each capability of a store that checkpoints rely on, with a temporary blob.

    Raises:
        UnreachableError: a call failed, or had no effect. The error message names the missing capability.
    """
    # use the folder `generations`, to detect a link or file in its place
    name, blobs, made = f"generations/.check-{secrets.token_hex(8)}", (b"first", b"second", b"third"), False

    def need(works: bool, lacks: str) -> None:
        if not works:
            raise UnreachableError(
                f"{store.url} {lacks}, so checkpoints cannot be stored there",
                hint="Upgrade the store, or choose another one.",
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
    return ConfigError([Problem(f"{url!r} is not a place for checkpoints", hint=hint)])


def is_name(name: str) -> bool:
    """Return whether a blob of this name can exist in every store, and a terminal can show the name.

    A valid name is a relative path with at most `DEEPEST` parts, without "..", control characters or the suffix
    `PARTIAL`.
    """
    parts = name.split("/")
    inside = not any(part in ("", ".", "..") for part in parts) and len(parts) <= DEEPEST
    return inside and name.isprintable() and not parts[-1].endswith(PARTIAL)


def checked_name(name: str) -> str:
    """Return `name` after checking that it is a valid name of a blob.

    Raises:
        ConfigError: `name` is no valid name of a blob (see `is_name`).
    """
    if not is_name(name):
        raise ConfigError(
            [Problem(f"{name!r} is not a valid name of a blob", hint="Use a relative path without '..'.")]
        )
    return name


def checked_prefix(prefix: str) -> str:
    """Return `prefix` after checking that it stays inside of the store. The last part of the path may be incomplete.

    Raises:
        ConfigError: `prefix` leads outside of the store.
    """
    if prefix.startswith("/") or ".." in prefix.split("/") or "\0" in prefix:
        raise ConfigError([Problem(f"{prefix!r} is outside of the store", hint="Use a relative path without '..'.")])
    return prefix
