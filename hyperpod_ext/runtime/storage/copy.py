"""Copy a checkpoint from one store to another, verifying checksums, with the manifest last.

Files that were copied before are skipped: the same call resumes an interrupted copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hyperpod_ext.errors import ConflictError, CorruptSnapshotError, UnreachableError
from hyperpod_ext.runtime.snapshot.dcp_metadata import METADATA_FILE
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme, crc_text
from hyperpod_ext.runtime.storage.inventory import Inventory, InventoryEntry, plans
from hyperpod_ext.runtime.storage.mac import Expected, Reading
from hyperpod_ext.runtime.storage.names import DOCUMENT_BYTES, MANIFEST, NOTE, VALUES
from hyperpod_ext.runtime.storage.object_store import MIB, ObjectStore, ignore
from hyperpod_ext.runtime.storage.retention import without_abandoned
from hyperpod_ext.runtime.storage.verify import CHUNK, expected, what_is_wrong

_IN_MEMORY = 1024 * MIB
"""Larger images go through a temporary file: the copying machine may have much less memory than a training node."""


@dataclass(slots=True)
class Copied:
    """Result of a copy."""

    files: int = 0
    nbytes: int = 0
    skipped: int = 0
    """Files that existed already."""
    new: bool = True
    """False: the whole checkpoint existed already."""


def check_destination(seen: InventoryEntry, destination: Inventory) -> None:
    """Check that a copy overwrites nothing at the destination and would be restored there.

    Raises:
        ConflictError: it would overwrite, or would never be restored.
    """
    where = f"{destination.store.url}/{seen.found.folder}"
    there = next((one for one in destination.seen if one.found == seen.found), None)
    if there is not None and MANIFEST in there.files and there.digest != seen.digest:
        raise ConflictError(f"{where} is another checkpoint of step {seen.found.step}", hint="choose another place")
    # notes next to a manifest are from nodes that failed after the commit
    if there is not None and MANIFEST not in there.files and any(map(NOTE.fullmatch, there.files)):
        raise ConflictError(
            f"{where} is being written by a job ({there.detail})", hint="wait for it, or choose another place"
        )
    if not without_abandoned([seen.found], destination.starts):
        later = {generation: step for generation, step in destination.starts.items() if step < seen.found.step}
        generation = max(later)
        raise ConflictError(
            f"nobody would restore it there: generation {generation} began at step {later[generation]}, "
            f"which gave up step {seen.found.step} of generation {seen.found.generation}",
            hint="choose another place",
        )


def copy(
    source: ObjectStore,
    seen: InventoryEntry,
    destination: Inventory,
    secret: bytes | None,
    on_bytes: Callable[[int], None] = ignore,
) -> Copied:
    """Copy one complete checkpoint. Without the job's `secret` only CRCs are checked.

    Raises:
        ConflictError: the destination has other files of this name.
        CorruptSnapshotError: the source is damaged; the copy stays without a manifest, so it does not count.
    """
    check_destination(seen, destination)
    there = next((one for one in destination.seen if one.found == seen.found), None)
    if there is not None and there.state == "complete":
        return Copied(skipped=len(there.files), new=False)
    sizes = there.files if there is not None else {}
    store, folder, copied = destination.store, seen.found.folder, Copied()
    read = seen.read_manifest(source, secret)
    files = expected(read)
    for file in files:
        if sizes.get(file.name) == file.nbytes and what_is_wrong(store, folder, file, secret) is None:
            copied.skipped += 1
            on_bytes(file.nbytes)
            continue
        _copy_file(source, store, folder, file, secret, on_bytes)
        copied.files, copied.nbytes = copied.files + 1, copied.nbytes + file.nbytes
    listed = {file.name for file in files}
    digests = plans(read)
    for small in sorted({*digests, VALUES, METADATA_FILE} - listed):
        data = source.get(f"{folder}/{small}", DOCUMENT_BYTES)
        if hashlib.sha256(data).hexdigest() != digests.get(small, hashlib.sha256(data).hexdigest()):
            raise CorruptSnapshotError(f"{source.url}/{folder}/{small} is not the plan that its name says")
        store.put(f"{folder}/{small}", memoryview(data), crc_text(crc64nvme(data)))
        copied.files, copied.nbytes = copied.files + 1, copied.nbytes + len(data)
    name = f"{folder}/{MANIFEST}"
    manifest = source.get(name, DOCUMENT_BYTES)
    if hashlib.sha256(manifest).hexdigest() != seen.digest:
        raise ConflictError(f"{source.url}/{folder} changed while it was copied", hint="copy it again")
    if not store.put_new(name, manifest) and store.get(name, DOCUMENT_BYTES) != manifest:
        raise ConflictError(f"{store.url}/{folder} has become another checkpoint while this one was copied")
    return copied


def _copy_file(
    source: ObjectStore,
    store: ObjectStore,
    folder: str,
    file: Expected,
    secret: bytes | None,
    on_bytes: Callable[[int], None],
) -> None:
    name = f"{folder}/{file.name}"
    with _room(file.nbytes) as image:
        reading = Reading(file, secret)
        for start in range(0, file.nbytes, CHUNK):
            with image[start : min(start + CHUNK, file.nbytes)] as piece:
                source.read_into(name, piece, start)
                reading.update(piece)
        if wrong := reading.wrong():
            raise CorruptSnapshotError(
                f"{source.url}/{name}: {wrong}",
                hint="It was not copied. `hp-ext checkpoints verify` tells all that is wrong with a checkpoint.",
            )
        store.put(name, image, file.crc64nvme, on_bytes=on_bytes)


@contextlib.contextmanager
def _room(nbytes: int) -> Iterator[memoryview]:
    """Yield memory for one image; large images use a temporary file."""
    with contextlib.ExitStack() as stack:
        descriptor = -1
        if nbytes > _IN_MEMORY:
            file = stack.enter_context(tempfile.TemporaryFile())
            descriptor = file.fileno()
            try:
                os.posix_fallocate(descriptor, 0, nbytes)  # raises if the disk is full; the mapping would get SIGBUS
            except OSError as error:
                raise UnreachableError(
                    f"no room for an image of {nbytes} bytes in {tempfile.gettempdir()}: {error.strerror}",
                    hint="Set TMPDIR to a place with more room.",
                ) from error
        memory = mmap.mmap(descriptor, max(nbytes, 1))
        stack.callback(_close, memory)
        view = stack.enter_context(memoryview(memory))
        yield stack.enter_context(view[:nbytes])


def _close(memory: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # an error's frames still hold views; freed with them
        memory.close()
