"""Read every byte of a checkpoint and compare it with the manifest, in constant memory."""

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
    """Return all files of a checkpoint that have checksums in its manifest."""
    return [Expected.of(manifest, file) for file in (*images(manifest).values(), *derived(manifest).values())]


def what_is_wrong(
    store: ObjectStore,
    folder: str,
    file: Expected,
    secret: bytes | None,
    on_bytes: Callable[[int], None] = ignore,
    cancelled: Callable[[], bool] = lambda: False,
) -> str | None:
    """Return the mismatch of a file's bytes, read piece by piece; None: no mismatch, or cancelled."""
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
    """Return every defect of a checkpoint. `on_bytes` gets the number of bytes read, from several threads.

    Without the job's `secret`, damage is found but not forgery.

    Raises:
        UnreachableError: the store stopped answering before the end.
        NotFoundError: the checkpoint was deleted meanwhile, for example by retention.
    """
    made_up = secret is not None and any(defect.file == MANIFEST for defect in seen.defects)
    if not seen.digest or seen.state == "foreign" or made_up:  # its checksums prove nothing
        return [*seen.defects]
    manifest = seen.read_manifest(store, secret)
    try:
        files = [file for file in expected(manifest) if seen.files.get(file.name) == file.nbytes]
        digests = plans(manifest)
    except NOT_A_MANIFEST:
        return [*seen.defects]  # they report the wrong form
    stop = threading.Event()

    def check(file: Expected) -> Defect | None:
        try:
            wrong = what_is_wrong(store, seen.found.folder, file, secret, on_bytes, stop.is_set)
        except (CorruptSnapshotError, NotFoundError) as error:  # changed since it was listed
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
        raise NotFoundError(f"{store.url}/{seen.found.folder} was deleted while it was read")
    return [*seen.defects, *found]


def read_plans(store: ObjectStore, seen: InventoryEntry, secret: bytes | None, manifest: Manifest) -> dict[str, Plan]:
    """Return the plans of a checkpoint by digest.

    Raises:
        NotFoundError: a plan is missing.
        CorruptSnapshotError: a plan does not have the digest in its name.
    """
    checkpoints = _reader(store, secret)
    return {digest: checkpoints.read_plan(seen.found.folder, digest) for digest in plans(manifest).values()}


def _reader(store: ObjectStore, secret: bytes | None) -> Checkpoints:
    """Return a reader of plans, which belong to no job."""
    return Checkpoints(store, job="", secret=secret or b"", trusting=secret is None)


def _check_plans(
    checkpoints: Checkpoints, seen: InventoryEntry, manifest: Manifest, digests: dict[str, str]
) -> Iterator[Defect]:
    found: dict[str, Plan] = {}
    for name, digest in digests.items():
        if name not in seen.files:
            continue  # reported already
        try:
            found[digest] = checkpoints.read_plan(seen.found.folder, digest)
        except (CorruptSnapshotError, NotFoundError) as error:
            yield Defect(name, error.message)
    parts = []
    for rank, snapshot in manifest["ranks"].items():
        if (plan := found.get(str(snapshot["plan"]))) is None:
            continue
        if plan.nbytes != snapshot["nbytes"]:
            yield Defect(str(manifest["files"][rank]), f"the plan of rank {rank} is for {plan.nbytes} bytes")
        values = snapshot.get("values")
        if not isinstance(values, list) or len(values) != len(leaf_paths(plan.shape)[1]):
            yield Defect(MANIFEST, f"rank {rank}: its plain values are not those of its plan")
            continue
        parts.append(RankFile(int(rank), plan, values, str(manifest["files"][rank])))
    complete = not is_of_node(manifest)
    if complete and not derived(manifest) and len(parts) == len(manifest["ranks"]) and not seen.defects:
        yield from _compare_derived(checkpoints.store, seen, parts)


def _compare_derived(store: ObjectStore, seen: InventoryEntry, parts: list[RankFile]) -> Iterator[Defect]:
    """Compare derived files with the ones this version would write, if the manifest lacks their checksums."""
    again = derive(parts, VALUES)
    for name, data in ((METADATA_FILE, again.metadata), (VALUES, again.values_file)):
        if store.get(f"{seen.found.folder}/{name}") != data:
            yield Defect(name, "it is not what the manifest stands for; training restores without it, dcp.load cannot")
