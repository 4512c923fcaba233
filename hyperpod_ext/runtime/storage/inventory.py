"""List the checkpoints of a store with their states, from one listing of files and the manifests.

The files with tensor data are not read. No manifest is trusted: a manifest that is truncated, forged, or belongs to
another job is reported as such.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from hyperpod_ext.errors import CorruptSnapshotError, NotFoundError
from hyperpod_ext.runtime.snapshot.dcp_metadata import METADATA_FILE
from hyperpod_ext.runtime.snapshot.manifest import (
    FORMAT,
    LIGHT_BYTES,
    Manifest,
    TooHeavyError,
    check_manifest,
    read_document,
    sign,
)
from hyperpod_ext.runtime.storage.checkpoints import Checkpoints, is_of_node, is_part, other_checkpoint, other_part
from hyperpod_ext.runtime.storage.mac import is_bound, read_mac
from hyperpod_ext.runtime.storage.names import (
    MANIFEST,
    NOTE,
    VALUES,
    Found,
    fenced_generations,
    parse_file,
    plan_name,
)
from hyperpod_ext.runtime.storage.object_store import MIB, ObjectStore, is_name
from hyperpod_ext.runtime.storage.retention import is_passed, to_keep, without_abandoned
from hyperpod_ext.runtime.storage.upload_split import ImageFile, files_of
from hyperpod_ext.terminal import quote

CheckpointState = Literal["complete", "unfinished", "damaged", "abandoned", "uncertain", "foreign"]
"""Abandoned: a later generation began before the checkpoint's step. Uncertain: the checkpoint may be abandoned, because
the claim file of a later generation is damaged. Foreign: written by another job, or by a newer version."""

NOT_A_MANIFEST = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
"""Exceptions that code raises if it reads a manifest with missing fields, or with fields of wrong types."""

_IMAGE = re.compile(r"__[0-9]+_[0-9]+\.distcp")
_MOST_NODES = 1 << 20
_LONG = 100
"""Messages quote and shorten file names of at least this many characters."""
_LATEST = 253402300800.0
"""Unix time of the year 10,000."""
_GETS_AT_ONCE = 8
_UNSIGNED = b"any secret"


@dataclass(frozen=True, slots=True)
class Defect:
    """One defect of a checkpoint."""

    file: str
    """Path of the defective file, relative to the checkpoint's folder."""
    message: str


@dataclass(frozen=True)
class InventoryEntry:
    """One checkpoint in the inventory of a store."""

    found: Found
    state: CheckpointState
    files: Mapping[str, int]
    """Size in bytes of each file of the checkpoint, by name."""
    defects: tuple[Defect, ...] = ()
    """Defects that show in the listing of files and in the manifest."""
    detail: str = ""
    """Short reason for `state`; may be empty."""
    digest: str = ""
    """SHA-256 of the manifest's bytes; empty if there is no readable manifest."""
    world_size: int | None = None
    created_at: float | None = None
    """Time of the commit in Unix seconds; None if unknown."""
    bound: bool = False
    """Whether the manifest has MACs of the files, which manifests of earlier versions do not have."""

    @property
    def nbytes(self) -> int:
        """Total size of the checkpoint's files in the store."""
        return sum(self.files.values())

    def read_manifest(self, store: ObjectStore, secret: bytes | None) -> Manifest:
        """Read this checkpoint's manifest, which is not kept in memory, because a forged manifest may be large.

        Raises:
            NotFoundError: the manifest was deleted after the inventory was made.
            CorruptSnapshotError: the manifest was changed after the inventory was made.
        """
        name = f"{self.found.folder}/{MANIFEST}"
        data = Checkpoints(store, job="", secret=secret or b"").fetch(name)
        if hashlib.sha256(data).hexdigest() != self.digest:
            raise CorruptSnapshotError(f"{store.url}/{name} changed since it was listed", hint="Try again.")
        return read_document(data, name, trusted=True)


@dataclass(frozen=True)
class Inventory:
    """The checkpoints of one store."""

    store: ObjectStore
    job: str | None
    """Job that wrote the checkpoints; None if no manifest names one."""
    seen: tuple[InventoryEntry, ...]
    """The checkpoints, newest first."""
    starts: Mapping[int, int]
    """Step after which each generation with a checkpoint began; later steps of older generations are abandoned."""
    damaged_fences: Mapping[int, CorruptSnapshotError] = field(default_factory=dict)
    """Error of each damaged claim file, by generation. Training cannot restore until damaged claim files are
    repaired."""

    def of_step(self, step: int) -> list[InventoryEntry]:
        """Return the checkpoints of one step: complete checkpoints first, and newer generations before older ones."""
        return sorted((one for one in self.seen if one.found.step == step), key=lambda one: one.state != "complete")


def take_inventory(
    store: ObjectStore, *, job: str | None = None, secret: bytes | None = None, lenient: bool = False
) -> Inventory:
    """Return the inventory of a store.

    Args:
        store: the store.
        job: name of the job that should own the checkpoints; None: the name of the store's folder if a manifest has it,
            or else the name in most manifests.
        secret: the job's secret, to check signatures; None: signatures are not checked.
        lenient: whether to report damaged claim files in the inventory, where checkpoints that may be abandoned are
            `uncertain`, instead of raising an error.

    Raises:
        CorruptSnapshotError: the claim file of a generation is damaged, so it is unknown which checkpoints are
            abandoned; not raised with `lenient`.
    """
    folders: dict[Found, dict[str, int]] = {}
    entries = store.list()
    for entry in entries:
        if (file := parse_file(entry.name)) is not None:
            folders.setdefault(file[0], {})[file[1]] = entry.nbytes
    trusting = job is None or secret is None
    checkpoints = Checkpoints(store, job=job or "", secret=secret or b"", trusting=trusting)
    with_manifest = [found for found, files in folders.items() if MANIFEST in files]
    damaged: dict[int, CorruptSnapshotError] = {}
    starts = checkpoints.starts(
        fenced_generations([entry.name for entry in entries]), with_manifest, damaged if lenient else None
    )
    look = partial(_look, Checkpoints(store, job="", secret=secret or b""), secret, threading.Lock())
    with ThreadPoolExecutor(_GETS_AT_ONCE) as pool:
        looks = pool.map(lambda found: look(found, folders[found]), with_manifest)
        looked = {found: one for found, one in zip(with_manifest, looks, strict=True) if one is not None}
    # drop checkpoints that retention has deleted since the listing (it deletes manifests first)
    for found in set(with_manifest) - set(looked):
        del folders[found]
    job = job or _guess_job(store.url.rpartition("/")[2], looked.values())
    alive = set(without_abandoned(list(folders), starts))
    seen = [
        _doubt(_judge(found, files, looked[found], job, found in alive), damaged)
        if found in looked
        else _unfinished(store, found, files)
        for found, files in folders.items()
    ]
    return Inventory(store, job, tuple(sorted(seen, key=lambda one: one.found, reverse=True)), starts, damaged)


@dataclass(frozen=True, slots=True)
class _Look:
    """Summary of an examined manifest."""

    defects: tuple[Defect, ...] = ()
    heavy: bool = False
    """Whether the manifest is too large to be read without the job's secret."""
    job: str | None = None
    format: int = FORMAT
    digest: str = ""
    world_size: int | None = None
    created_at: float | None = None
    bound: bool = False


def _look(
    checkpoints: Checkpoints, secret: bytes | None, turn: threading.Lock, found: Found, files: Mapping[str, int]
) -> _Look | None:
    # parse only one large manifest at a time, because parsing takes up to 30 times the file's size in memory
    with turn if files[MANIFEST] > MIB else nullcontext():
        try:
            data = checkpoints.fetch(f"{found.folder}/{MANIFEST}")
            manifest = read_document(data, MANIFEST, trusted=True)
        except NotFoundError:
            return None
        except CorruptSnapshotError as error:
            wrong = error.message.removeprefix(f"{checkpoints.store.url}/{found.folder}/").removeprefix(f"{MANIFEST}: ")
            return _Look((Defect(MANIFEST, wrong),), heavy=isinstance(error, TooHeavyError) and secret is None)
        number, of, created_at = (manifest.get(key) for key in ("format", "world_size", "created_at"))
        in_time = isinstance(created_at, int | float) and 0 <= created_at < _LATEST
        return _Look(
            tuple(examine(manifest, found, files, secret)),
            job=manifest["job"] if isinstance(manifest.get("job"), str) else None,
            format=number if type(number) is int else FORMAT,
            digest=hashlib.sha256(data).hexdigest(),
            world_size=of if type(of) is int else None,
            created_at=float(created_at) if in_time and created_at is not None else None,
            bound=is_bound(manifest),
        )


def _guess_job(name: str, looks: Collection[_Look]) -> str | None:
    jobs = Counter(look.job for look in looks if look.job is not None)
    return name if name in jobs or not jobs else jobs.most_common(1)[0][0]


def _judge(found: Found, files: Mapping[str, int], look: _Look, job: str | None, alive: bool) -> InventoryEntry:
    def entry(state: CheckpointState, detail: str, defects: tuple[Defect, ...] = ()) -> InventoryEntry:
        of_manifest = (look.digest, look.world_size, look.created_at, look.bound)
        return InventoryEntry(found, state, files, defects, detail, *of_manifest)

    if look.heavy:
        detail = f"{MANIFEST}: {look.defects[0].message}; pass the secret with --secret-file"
        return entry("uncertain", detail, look.defects)
    if look.digest and look.format > FORMAT:
        detail = f"format {quote(look.format)} is newer than {FORMAT}, the newest format that this version reads"
        return entry("foreign", detail, (Defect(MANIFEST, detail),))
    if look.digest and look.job != job:
        detail = f"belongs to job {quote(look.job)}, not to {job!r}"
        return entry("foreign", detail, (Defect(MANIFEST, detail),))
    if look.defects:
        more = f", and {len(look.defects) - 1} more" if len(look.defects) > 1 else ""
        return entry("damaged", f"{look.defects[0].file}: {look.defects[0].message}{more}", look.defects)
    if not alive:
        return entry("abandoned", "a later generation began before this step")
    return entry("complete", "" if look.bound else "no MAC of its files: written by an earlier version")


def _doubt(seen: InventoryEntry, damaged: Collection[int]) -> InventoryEntry:
    later = [generation for generation in damaged if generation > seen.found.generation]
    if seen.state != "complete" or not later:
        return seen
    detail = f"generation {min(later)} may have abandoned it: the generation's claim file is damaged"
    return replace(seen, state="uncertain", detail=detail)


def examine(manifest: Manifest, found: Found, files: Mapping[str, int], secret: bytes | None) -> Iterator[Defect]:
    """Yield every defect of a manifest, including differences from the files in its folder.

    Args:
        manifest: the manifest, not verified yet.
        found: step and generation in the folder's name.
        files: size of each file in the folder, by name.
        secret: the job's secret; None: signatures are not checked.
    """
    try:
        yield from _examine(manifest, found, files, secret)
    except NOT_A_MANIFEST as error:
        yield Defect(MANIFEST, f"lacks fields of a manifest, or has invalid ones: {quote(error)}")


def _examine(manifest: Manifest, found: Found, files: Mapping[str, int], secret: bytes | None) -> Iterator[Defect]:
    yield from _check_signed(manifest, secret, str(manifest["job"]), "")
    if (manifest["step"], manifest["generation"]) != (found.step, found.generation):
        yield Defect(MANIFEST, other_checkpoint(manifest))
    if not isinstance(manifest["created_at"], int | float):
        yield Defect(MANIFEST, f"created_at is {quote(manifest['created_at'])}")
    ranks = {str(rank) for rank in range(len(manifest["ranks"]))}
    if is_of_node(manifest):
        ranks = set(manifest["ranks"])
    elif manifest["world_size"] != len(ranks):
        ranks = set()
    if not ranks or set(manifest["ranks"]) != ranks or set(manifest["files"]) != ranks:
        size = quote(manifest["world_size"])
        yield Defect(MANIFEST, f"its world_size is {size}, but it does not list the ranks and files of such a job")
        return
    known_images: dict[str, ImageFile] = {}
    for rank, snapshot in manifest["ranks"].items():
        yield from _check_signed(snapshot, secret, str(manifest["job"]), f"rank {rank}: ")
        if not isinstance(snapshot["values"], list):
            yield Defect(MANIFEST, f"rank {rank}: its snapshot has no list of plain values")
        if not is_part(snapshot, rank, manifest) or snapshot["world_size"] != manifest["world_size"]:
            message = f"rank {rank}: its snapshot does not belong to this checkpoint; it is {other_part(snapshot)}"
            yield Defect(MANIFEST, message)
        for file in files_of(manifest, rank):
            if known_images.setdefault(file.name, file) != file:
                yield Defect(MANIFEST, f"rank {rank}: shares {quote(file.name)} with a rank whose snapshot differs")
    for name, file in known_images.items():
        yield from _check_size(files, name, file.nbytes)
        if not _IMAGE.fullmatch(name):
            yield Defect(MANIFEST, f"{quote(name)} is not a valid file name for a rank's snapshot")
    for name in sorted(plans(manifest)):
        yield from _check_size(files, name, None)
    known = derived(manifest)
    for name in {**known_images, **known} if is_bound(manifest) else ():
        try:
            read_mac(manifest["macs"].get(name))
        except (KeyError, ValueError) as error:
            yield Defect(MANIFEST, f"its MAC of {quote(name)} is {error}")
    for name in (VALUES, METADATA_FILE) if not is_of_node(manifest) else ():
        yield from _check_size(files, name, known[name].nbytes if name in known else None)


def _check_signed(manifest: Manifest, secret: bytes | None, job: str, whose: str) -> Iterator[Defect]:
    if secret is None:  # sign the manifest here, so that all checks except that of its original signature are made
        manifest, secret = sign(manifest, _UNSIGNED), _UNSIGNED
    try:
        check_manifest(manifest, secret, job=job, where=MANIFEST)
    except CorruptSnapshotError as error:
        yield Defect(MANIFEST, whose + error.message.removeprefix(f"{MANIFEST}: "))


def _check_size(files: Mapping[str, int], name: str, nbytes: int | None) -> Iterator[Defect]:
    if name not in files:
        yield Defect(name if is_name(name) and len(name) < _LONG else quote(name), "is missing")
    elif nbytes is not None and files[name] != nbytes:
        yield Defect(name, f"has {files[name]} bytes, but the manifest lists {quote(nbytes)}")


def images(manifest: Manifest) -> dict[str, ImageFile]:
    """Return the files with the bytes of all ranks' snapshots, by name."""
    return {file.name: file for rank in manifest["ranks"] for file in files_of(manifest, rank)}


def plans(manifest: Manifest) -> dict[str, str]:
    """Return the digest of each layout plan of a checkpoint, by the plan's file name."""
    digests = {str(snapshot["plan"]) for snapshot in manifest["ranks"].values()}
    return {plan_name(digest): digest for digest in digests}


def derived(manifest: Manifest) -> dict[str, ImageFile]:
    """Return the files that only plain dcp.load needs and that have a checksum in the manifest, by name.

    Manifests of earlier versions have no checksums of these files.
    """
    known = manifest.get("derived", {})
    return {
        name: ImageFile(name, 0, int(known[name]["nbytes"]), str(known[name]["crc64nvme"]))
        for name in (VALUES, METADATA_FILE)
        if name in known
    }


def _unfinished(store: ObjectStore, found: Found, files: Mapping[str, int]) -> InventoryEntry:
    notes = [match for name in files if (match := NOTE.fullmatch(name))]
    announced = {int(match[2]) for match in notes if match[1] == "node"}
    done = {int(match[2]) for match in notes if match[1] == "done"}
    failed = {int(match[2]) for match in notes if match[1] == "failed"}
    left = {int(match[2]) for match in notes if match[1] == "left"}
    detail = _missing(announced, done, failed, left, _nodes(store, found, announced))
    return InventoryEntry(found, "unfinished", files, detail=detail)


def _nodes(store: ObjectStore, found: Found, announced: Collection[int]) -> int | None:
    """Return the job's number of nodes according to the first readable announcement; None if none is readable."""
    for node in sorted(announced):
        try:
            name = f"{found.folder}/node-{node}.json"
            note = read_document(store.get(name, LIGHT_BYTES), name)
            nodes = int(-(-int(note["manifests"][0]["world_size"]) // len(note["manifests"])))
            if 0 < nodes < _MOST_NODES:
                return nodes
        except (NotFoundError, CorruptSnapshotError, IndexError, *NOT_A_MANIFEST):
            continue
    return None


def _missing(
    announced: Collection[int], done: Collection[int], failed: Collection[int], left: Collection[int], nodes: int | None
) -> str:
    out = {*failed, *left}
    silent = set(range(nodes)) - set(announced) - out if nodes is not None else set()
    parts = [f"upload failed on {_name_nodes(failed)}"] if failed else []
    if left:
        parts.append(f"upload cancelled on {_name_nodes(left)} for a newer step")
    if silent:
        parts.append(f"upload not started on {_name_nodes(silent)}")
    if uploading := set(announced) - set(done) - out:
        parts.append(f"upload not finished on {_name_nodes(uploading)}")
    return ", ".join(parts) or ("all nodes have uploaded, but there is no manifest yet" if done else "no manifest")


def _name_nodes(nodes: Collection[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, sorted(nodes)))}"


def select_prunable(
    inventory: Inventory, keep: int, every_steps: int | None, steps: Collection[int], *, with_damaged: bool = False
) -> list[InventoryEntry]:
    """Return the checkpoints that the retention would delete, newest first.

    The newest complete checkpoint and all checkpoints of later steps stay. An unfinished checkpoint stays if a run that
    was restored from an older step may still be uploading it. Checkpoints of other jobs or newer versions always stay.

    Args:
        inventory: the checkpoints.
        keep: number of newest complete checkpoints to keep; damaged checkpoints do not count among them.
        every_steps: keep each checkpoint whose step is a multiple of this number; None: keep no such checkpoint.
        steps: further steps to keep.
        with_damaged: whether damaged checkpoints may be deleted.
    """
    good = [one.found for one in inventory.seen if one.state == "complete"]
    if not good:
        return []
    kept = set(to_keep(good, keep, every_steps, steps))
    may_go: Sequence[CheckpointState] = ("complete", "unfinished", "abandoned", *(("damaged",) if with_damaged else ()))
    return [
        one
        for one in inventory.seen
        if one.state in may_go
        and one.found not in kept
        and one.found.step < max(good).step
        and (one.state != "unfinished" or is_passed(one.found, good))
        and not (one.state == "damaged" and one.found in to_keep([max(good), one.found], 1, every_steps, steps))
    ]
