"""Read every byte of a checkpoint and compare the checksums with those in the manifest, with constant memory use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from hyperpod_ext.errors import CorruptSnapshotError, NotFoundError
from hyperpod_ext.runtime.snapshot.dcp_metadata import METADATA_FILE, RankFile, derive
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.manifest import Manifest
from hyperpod_ext.runtime.snapshot.tree import leaf_paths
from hyperpod_ext.runtime.storage.checkpoints import Checkpoints, is_of_node
from hyperpod_ext.runtime.storage.inventory import (
    NOT_A_MANIFEST,
    Defect,
    InventoryEntry,
    derived,
    images,
    plans,
)
from hyperpod_ext.runtime.storage.mac import Expected, Reading
from hyperpod_ext.runtime.storage.names import MANIFEST, VALUES
from hyperpod_ext.runtime.storage.object_store import MIB, ObjectStore, ignore

CHUNK = 16 * MIB
FILES_AT_ONCE = 4


def expected(manifest: Manifest) -> list[Expected]:
    """Return the files of a checkpoint that have a checksum in the checkpoint's manifest."""
    return [Expected.of(manifest, file) for file in (*images(manifest).values(), *derived(manifest).values())]


def what_is_wrong(
    store: ObjectStore,
    folder: str,
    file: Expected,
    secret: bytes | None,
    on_bytes: Callable[[int], None] = ignore,
    cancelled: Callable[[], bool] = lambda: False,
) -> str | None:
    """Read a file piece by piece and return a description of its first mismatch; None: no mismatch, or cancelled.

    Args:
        store: the store that has the file.
        folder: folder of the checkpoint.
        file: expected size, CRC and MAC of the file.
        secret: the job's secret, to check the MAC; None: only the CRC is checked.
        on_bytes: called with the number of bytes of each piece read.
        cancelled: returns whether to stop reading.
    """
    buffer = memoryview(bytearray(min(CHUNK, file.nbytes)))
    reading, done = Reading(file, secret), 0
    while done < file.nbytes:
        if cancelled():
            return None
        piece = buffer[: min(len(buffer), file.nbytes - done)]
        store.read_into(f"{folder}/{file.name}", piece, done, on_bytes=on_bytes)
        reading.update(piece)
        done += len(piece)
    return reading.wrong()


def verify(
    store: ObjectStore, seen: InventoryEntry, secret: bytes | None, on_bytes: Callable[[int], None] = ignore
) -> list[Defect]:
    """Read all files of a checkpoint, and return every defect.

    Args:
        store: the store that has the checkpoint.
        seen: the checkpoint, as listed in the inventory.
        secret: the job's secret; None: damage is found, but not forgery.
        on_bytes: called with the number of bytes of each piece read, from several threads.

    Raises:
        UnreachableError: the store stopped answering before all files were read.
        NotFoundError: the checkpoint was deleted during the verification, for example by the retention.
    """
    made_up = secret is not None and any(defect.file == MANIFEST for defect in seen.defects)
    if not seen.digest or seen.state == "foreign" or made_up:  # checksums in a wrong manifest prove nothing
        return [*seen.defects]
    manifest = seen.read_manifest(store, secret)
    try:
        files = [file for file in expected(manifest) if seen.files.get(file.name) == file.nbytes]
        digests = plans(manifest)
    except NOT_A_MANIFEST:
        return [*seen.defects]  # the inventory has already reported the wrong fields
    stop = threading.Event()

    def check(file: Expected) -> Defect | None:
        try:
            wrong = what_is_wrong(store, seen.found.folder, file, secret, on_bytes, stop.is_set)
        except (CorruptSnapshotError, NotFoundError) as error:  # this file has changed since the listing
            return Defect(file.name, error.message)
        return Defect(file.name, wrong) if wrong is not None else None

    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        try:
            found = [defect for defect in pool.map(check, files) if defect is not None]
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    found += _check_plans(_reader(store, secret), seen, manifest, digests)
    if found and not store.list(f"{seen.found.folder}/{MANIFEST}"):
        raise NotFoundError(
            f"{store.url}/{seen.found.folder} was deleted while it was read",
            hint="Its job deletes older checkpoints; choose a newer one.",
        )
    return [*seen.defects, *found]


def read_plans(store: ObjectStore, seen: InventoryEntry, secret: bytes | None, manifest: Manifest) -> dict[str, Plan]:
    """Return the layout plans of a checkpoint by digest.

    Raises:
        NotFoundError: a plan's file is missing.
        CorruptSnapshotError: the SHA-256 of a plan is not the digest in its file name.
    """
    checkpoints = _reader(store, secret)
    return {digest: checkpoints.read_plan(seen.found.folder, digest) for digest in plans(manifest).values()}


def _reader(store: ObjectStore, secret: bytes | None) -> Checkpoints:
    """Return an object that reads plans, without a job's name, because a plan does not name its job."""
    return Checkpoints(store, job="", secret=secret or b"", trusting=secret is None)


def _check_plans(
    checkpoints: Checkpoints, seen: InventoryEntry, manifest: Manifest, digests: dict[str, str]
) -> Iterator[Defect]:
    found: dict[str, Plan] = {}
    for name, digest in digests.items():
        if name not in seen.files:
            continue  # the inventory reports the missing file
        try:
            found[digest] = checkpoints.read_plan(seen.found.folder, digest)
        except (CorruptSnapshotError, NotFoundError) as error:
            yield Defect(name, error.message.removeprefix(f"{checkpoints.store.url}/{seen.found.folder}/{name}: "))
    parts = []
    for rank, snapshot in manifest["ranks"].items():
        if (plan := found.get(str(snapshot["plan"]))) is None:
            continue
        if plan.nbytes != snapshot["nbytes"]:
            yield Defect(
                str(manifest["files"][rank]),
                f"rank {rank}: its layout plan has {plan.nbytes} bytes, and its snapshot has {snapshot['nbytes']}",
            )
        values = snapshot.get("values")
        if not isinstance(values, list) or len(values) != len(leaf_paths(plan.shape)[1]):
            yield Defect(MANIFEST, f"rank {rank}: the number of its plain values differs from its plan")
            continue
        parts.append(RankFile(int(rank), plan, values, str(manifest["files"][rank])))
    complete = not is_of_node(manifest)
    if complete and not derived(manifest) and len(parts) == len(manifest["ranks"]) and not seen.defects:
        yield from _compare_derived(checkpoints.store, seen, parts)


def _compare_derived(store: ObjectStore, seen: InventoryEntry, parts: list[RankFile]) -> Iterator[Defect]:
    """Compare the files that only plain dcp.load needs with the files that this version would write.

    Only checkpoints of earlier versions need this check, because their manifests have no checksums of these files.
    """
    again = derive(parts, VALUES)
    for name, data in ((METADATA_FILE, again.metadata), (VALUES, again.values_file)):
        if store.get(f"{seen.found.folder}/{name}") != data:
            yield Defect(name, "differs from the manifest; training does not need this file, but dcp.load does")
