"""Copy a checkpoint from one store to another: verify the checksum of each file, and copy the manifest last.

Files that are already at the destination are skipped, so that the same call resumes an interrupted copy.
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
"""Size in bytes above which a file is copied through a temporary file instead of memory.

The limit is small, because the machine that copies may have much less memory than a training node.
"""


@dataclass(slots=True)
class Copied:
    """Result of a copy."""

    files: int = 0
    """Number of files copied."""
    nbytes: int = 0
    """Number of bytes copied."""
    skipped: int = 0
    """Number of files that were already at the destination."""
    new: bool = True
    """Whether the call has made the copy; false if the complete checkpoint was already at the destination."""


def check_destination(seen: InventoryEntry, destination: Inventory) -> None:
    """Check that a copy of a checkpoint overwrites nothing at the destination, and can be restored there.

    Args:
        seen: the checkpoint to copy.
        destination: inventory of the destination's store.

    Raises:
        ConflictError: the copy would overwrite another checkpoint, or would never be restored at the destination.
    """
    where = f"{destination.store.url}/{seen.found.folder}"
    there = next((one for one in destination.seen if one.found == seen.found), None)
    if there is not None and MANIFEST in there.files and there.digest != seen.digest:
        raise ConflictError(f"{where} is another checkpoint of step {seen.found.step}", hint="choose another place")
    # notes of nodes mean that an upload is running, unless there is a manifest
    if there is not None and MANIFEST not in there.files and any(map(NOTE.fullmatch, there.files)):
        raise ConflictError(
            f"{where} is being written by a job ({there.detail})", hint="wait for it, or choose another place"
        )
    if not without_abandoned([seen.found], destination.starts):
        later = {generation: step for generation, step in destination.starts.items() if step < seen.found.step}
        generation = max(later)
        raise ConflictError(
            f"no job would restore step {seen.found.step} of generation {seen.found.generation} from "
            f"{destination.store.url}: generation {generation} of the job there continued from step "
            f"{later[generation]}, which abandons later steps of older generations",
            hint="choose another place",
        )


def copy(
    source: ObjectStore,
    seen: InventoryEntry,
    destination: Inventory,
    secret: bytes | None,
    on_bytes: Callable[[int], None] = ignore,
) -> Copied:
    """Copy one complete checkpoint.

    Args:
        source: the store that has the checkpoint.
        seen: the checkpoint, as listed in the inventory of `source`.
        destination: inventory of the store to copy to.
        secret: the job's secret, to check MACs; None: only CRCs are checked.
        on_bytes: called with the number of bytes of each piece that was copied or skipped.

    Raises:
        ConflictError: the destination has another checkpoint of the same name, or no job would restore the copy.
        CorruptSnapshotError: the checkpoint is damaged. After an error, the incomplete copy does not count, because it
            has no manifest.
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
            raise CorruptSnapshotError(f"{source.url}/{folder}/{small}: its SHA-256 differs from its name")
        store.put(f"{folder}/{small}", memoryview(data), crc_text(crc64nvme(data)))
        copied.files, copied.nbytes = copied.files + 1, copied.nbytes + len(data)
    name = f"{folder}/{MANIFEST}"
    manifest = source.get(name, DOCUMENT_BYTES)
    if hashlib.sha256(manifest).hexdigest() != seen.digest:
        raise ConflictError(f"{source.url}/{folder} changed while it was copied", hint="copy it again")
    if not store.put_new(name, manifest) and store.get(name, DOCUMENT_BYTES) != manifest:
        raise ConflictError(f"{store.url}/{folder}: another checkpoint was written there during the copy")
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
                hint="The file was not copied. Choose another --step; `hp-ext checkpoints verify` lists all defects.",
            )
        store.put(name, image, file.crc64nvme, on_bytes=on_bytes)


@contextlib.contextmanager
def _room(nbytes: int) -> Iterator[memoryview]:
    """Yield `nbytes` of memory for one file. If the file is large, the memory is mapped to a temporary file."""
    with contextlib.ExitStack() as stack:
        descriptor = -1
        if nbytes > _IN_MEMORY:
            file = stack.enter_context(tempfile.TemporaryFile())
            descriptor = file.fileno()
            try:
                os.posix_fallocate(descriptor, 0, nbytes)  # raise if the disk is full, instead of SIGBUS at a write
            except OSError as error:
                raise UnreachableError(
                    f"{tempfile.gettempdir()} has no space for a file of {nbytes} bytes: {error.strerror}",
                    hint="Set TMPDIR to a folder with more free space.",
                ) from error
        memory = mmap.mmap(descriptor, max(nbytes, 1))
        stack.callback(_close, memory)
        view = stack.enter_context(memoryview(memory))
        yield stack.enter_context(view[:nbytes])


def _close(memory: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # the memory stays mapped while an error's frames hold views of it
        memory.close()
