"""Checkpoints in an object store: their files, and how a checkpoint is written, committed and deleted.

    NAME-OF-THE-JOB/
      generations/000002.json            claim file: created once, by one run; stops writers of older generations
      step-000000100-g000002/
        __0_0.distcp __1_0.distcp ...    images: the bytes of each rank's snapshot, as in memory
        __0_2.distcp __1_2.distcp ...    first bytes of those images: frozen parameters, if they are large
        plan-3f2a….json                  layouts of the images, by digest
        __0_1.distcp .metadata           files that only plain dcp.load needs
        manifest.json                    signed, and created last, only if absent: with it the checkpoint is complete

The manifest has a MAC of each file, made by the node that uploaded the file. Files without a valid MAC are refused.

Before the commit, each node announces its snapshots in `node-N.json`, and reports the end of its uploads in
`done-N.json`. Any node that finds all snapshots uploaded writes the manifest, so that the death of a single node cannot
lose a complete checkpoint. A node that cannot upload its snapshots writes `failed-N.json` if the upload failed, or
`left-N.json` if a newer step needed the memory, so that no other node waits for it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hyperpod_ext.errors import CorruptSnapshotError, HyperpodExtError, NotFoundError, StaleGenerationError
from hyperpod_ext.runtime.snapshot.dcp_metadata import METADATA_FILE, RankFile, derive
from hyperpod_ext.runtime.snapshot.layout_plan import Plan, read_plan
from hyperpod_ext.runtime.snapshot.manifest import (
    FORMAT,
    LIGHT_BYTES,
    Manifest,
    TooHeavyError,
    check_manifest,
    content_of,
    crc64nvme,
    crc_text,
    is_light,
    is_signed_text,
    read_document,
    save_id_of,
    signed_text,
)
from hyperpod_ext.runtime.storage.mac import Expected, Mac, is_bound, mac_of
from hyperpod_ext.runtime.storage.names import (
    DOCUMENT_BYTES,
    MANIFEST,
    NOTE,
    NOTE_BYTES,
    VALUES,
    Found,
    fence_name,
    fenced_generations,
    image_of,
    parse_file,
    parse_folder,
    plan_name,
)
from hyperpod_ext.runtime.storage.object_store import ObjectStore, Until, never
from hyperpod_ext.runtime.storage.retention import is_passed, remove, to_keep, without_abandoned
from hyperpod_ext.runtime.storage.upload_split import ImageFile, files_of, frozen_part, split_image
from hyperpod_ext.terminal import quote

_UNPROVED = 10_000
"""Largest generation number that counts even if no file of the generation is signed by this job.

A real job reaches this number only after as many faults or resizes.
"""


def is_of_node(manifest: Manifest) -> bool:
    """Return whether a checkpoint has the ranks of one node only, as in the disk tier."""
    return manifest.get("of_node") is True


def other_checkpoint(manifest: Manifest) -> str:
    """Return the error text for a checkpoint's manifest that is in the folder of another checkpoint."""
    of = f"step {quote(manifest.get('step'))}, generation {quote(manifest.get('generation'))}"
    return f"is the manifest of {of}, but is in the folder of another checkpoint"


def other_part(snapshot: Manifest) -> str:
    """Return the rank, step and generation of a snapshot that is in the wrong place, for an error text.

    Raises:
        KeyError: the manifest lacks a field.
    """
    rank, generation, step = (quote(snapshot[key]) for key in ("rank", "generation", "step"))
    return f"of rank {rank}, step {step}, generation {generation} ({quote(snapshot['save_id'])})"


def is_part(snapshot: Manifest, rank: str, commit: Mapping[str, Any]) -> bool:
    """Return whether a snapshot belongs to this rank and this commit; a signature proves only that the job wrote it.

    Args:
        snapshot: manifest of the snapshot.
        rank: number of the rank.
        commit: generation, step and save ID of the checkpoint.
    """
    same = all(snapshot[key] == commit[key] for key in ("generation", "step", "save_id"))
    return same and str(snapshot["rank"]) == rank


@dataclass(frozen=True, slots=True)
class CheckpointProgress:
    """The nodes that have announced, uploaded, failed to upload, or cancelled their part of a checkpoint."""

    announced: frozenset[int]
    done: frozenset[int]
    failed: frozenset[int]
    left: frozenset[int]
    """Nodes that have cancelled the upload, because a newer step needed the memory."""
    complete: bool
    """Whether the checkpoint's manifest exists."""


class Checkpoints:
    """The checkpoints of one job in one store. Several nodes may read and write the store at the same time.

    Args:
        store: the store, which has only this job's files.
        job: the job's name.
        secret: the key that signs and verifies files.
        trusting: whether to accept claim files without checking their signatures, for listings without the secret.
    """

    def __init__(self, store: ObjectStore, *, job: str, secret: bytes, trusting: bool = False) -> None:
        self.store, self._job, self._secret, self._trusting = store, job, secret, trusting
        self._ours: set[Found] = set()
        """Checkpoints whose manifests were verified. A manifest never changes, so it is verified only once."""

    def until(self, cancelled: Callable[[], bool]) -> Checkpoints:
        """Return a copy of this object, whose methods raise `Cancelled` once `cancelled()` is true."""
        bound = Checkpoints(Until(self.store, cancelled), job=self._job, secret=self._secret)
        bound._ours = self._ours
        return bound

    # --- reading --------------------------------------------------------------------------------

    def found(self) -> list[Found]:
        """Return all checkpoints that have a manifest and are not abandoned (see `without_abandoned`), newest first."""
        names = [entry.name for entry in self.store.list()]
        with_manifest = [file[0] for name in names if (file := parse_file(name)) and file[1] == MANIFEST]
        return without_abandoned(with_manifest, self.starts(fenced_generations(names), with_manifest))

    def starts(
        self,
        fenced: Collection[int],
        found: Collection[Found],
        damaged: dict[int, CorruptSnapshotError] | None = None,
    ) -> dict[int, int]:
        """Return, by generation, the step after which the generation began. Later steps of older generations are
        abandoned.

        A generation without a checkpoint is left out, because its run died before a save. A generation is also left out
        if neither its claim file nor a checkpoint of it is signed by this job, because anybody may have written them.

        Args:
            fenced: generations with a claim file.
            found: checkpoints with a manifest.
            damaged: receives the error of each damaged claim file, by generation; None: the first error is raised.

        Raises:
            CorruptSnapshotError: a claim file is damaged. Without the claim file, abandoned steps could be restored.
        """
        saved: dict[int, list[Found]] = {}
        for one in found:
            saved.setdefault(one.generation, []).append(one)
        starts = {}
        for number in sorted(saved.keys() & set(fenced) - {min(saved, default=0)}):
            try:
                starts[number] = int(self._read_fence(number, saved[number])["step"])
            except NotFoundError:
                continue  # this claim file was deleted after the listing
            except CorruptSnapshotError as error:
                if not self._trusting and not any(map(self._is_ours, saved[number])):
                    continue
                corrupt = CorruptSnapshotError(
                    f"{error.message}, so it is unknown which steps generation {number} abandoned",
                    hint="Restore that file from a backup, or use the secret that it was signed with. If you delete "
                    "the file, the checkpoints of older generations count again, the newest step first.",
                )
                if damaged is None:
                    raise corrupt from error
                damaged[number] = corrupt
        return starts

    def read(self, found: Found) -> Manifest:
        """Return the verified manifest of a checkpoint.

        Raises:
            NotFoundError: the checkpoint has no manifest.
            CorruptSnapshotError: the manifest is damaged, or belongs to another job.
        """
        name = f"{found.folder}/{MANIFEST}"
        where = f"{self.store.url}/{name}"
        manifest = read_document(self.fetch(name), where, trusted=True)
        check_manifest(manifest, self._secret, job=self._job, where=where)
        ranks, files, macs = manifest.get("ranks"), manifest.get("files"), manifest.get("macs", {})
        if not (isinstance(ranks, dict) and isinstance(files, dict) and ranks.keys() == files.keys()):
            raise CorruptSnapshotError(f"{where}: signed by the job, but does not list the ranks and files")
        if (manifest.get("step"), manifest.get("generation")) != (found.step, found.generation):
            raise CorruptSnapshotError(f"{where}: {other_checkpoint(manifest)}")
        _check_parts(ranks, manifest, where)
        try:
            names = {file.name for rank in ranks for file in files_of(manifest, rank)}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CorruptSnapshotError(
                f"{where}: the manifest does not list the files of a rank's image: {error!r}"
            ) from error
        if is_bound(manifest) and (missing := names - set(macs)):
            raise CorruptSnapshotError(f"{where}: lists no MAC of the file {min(missing)}")
        return manifest

    def mac(self, data: memoryview, cancelled: Callable[[], bool] = never) -> Mac:
        """Return the MAC of a file for the argument `macs` of `commit`. The MAC proves that this job wrote the file."""
        return mac_of(self._secret, data, cancelled)

    def read_image(self, folder: str, manifest: Manifest, rank: str, image: memoryview) -> None:
        """Read the bytes of a rank's snapshot into memory, and verify their MAC.

        Args:
            folder: folder of the checkpoint.
            manifest: the checkpoint's manifest, already verified.
            rank: number of the rank.
            image: memory of the snapshot's size.

        Raises:
            NotFoundError: a file is missing.
            CorruptSnapshotError: the snapshot is damaged, or was not written by this job.
        """
        for file in files_of(manifest, rank):
            name = f"{folder}/{file.name}"
            with image[file.start : file.start + file.nbytes] as part:
                self.store.read_into(name, part)
                Expected.of(manifest, file).check(part, self._secret, f"{self.store.url}/{name}")

    def read_plan(self, folder: str, digest: str) -> Plan:
        """Return the plan with the given digest, which is the layout of one rank's snapshot.

        Raises:
            NotFoundError: there is no plan with this digest.
            CorruptSnapshotError: the plan's SHA-256 is not the digest in its file name.
        """
        name = f"{folder}/{plan_name(digest)}"
        data = self.store.get(name)
        trusted = not self._trusting and hashlib.sha256(data).hexdigest() == digest
        return read_plan(read_document(data, f"{self.store.url}/{name}", trusted=trusted), digest)

    def fetch(self, name: str) -> bytes:
        """Return the bytes of a JSON document. A large document is returned only if this job has signed it.

        Parsing takes many times the document's size in memory; `is_light` has the limits of a small document.

        Raises:
            NotFoundError: there is no such document.
            CorruptSnapshotError: the document is large, and not signed by this job.
        """
        try:
            data = self.store.get(name, LIGHT_BYTES)
        except CorruptSnapshotError:
            nbytes = next((entry.nbytes for entry in self.store.list(name) if entry.name == name), 0)
        else:
            if is_light(data):
                return data
            nbytes = len(data)

        def piece(start: int, end: int) -> bytearray:
            self.store.read_into(name, memoryview(read := bytearray(end - start)), start)
            return read

        if nbytes <= DOCUMENT_BYTES and is_signed_text(piece, nbytes, self._secret):
            data = self.store.get(name, nbytes)
            if is_signed_text(lambda start, end: memoryview(data)[start:end], len(data), self._secret):
                return data
        raise TooHeavyError(f"{self.store.url}/{name}", nbytes)

    # --- generations ----------------------------------------------------------------------------

    def newest_generation(self) -> int:
        """Return the highest generation that has a claim file or a file of a checkpoint; 0: there is none.

        A generation above `_UNPROVED` counts only if its claim file or one of its checkpoints is signed by this job,
        because anybody can write a file with such a name.
        """
        names = [entry.name for entry in self.store.list()]
        fenced = fenced_generations(names)
        written: dict[int, list[Found]] = {number: [] for number in fenced}
        for name in names:
            if (file := parse_file(name)) is not None:
                its = written.setdefault(file[0].generation, [])
                its += [file[0]] if file[1] == MANIFEST else []
        for number in sorted(written, reverse=True):
            if number <= _UNPROVED or self.fence_of(number) is not None or any(map(self._is_ours, written[number])):
                return number
        return 0

    def fence(self, generation: int, step: int, run: str) -> None:
        """Write the claim file of `generation`, which begins after `step` and belongs to `run`.

        Call this method before the first write of the generation.

        Raises:
            StaleGenerationError: the generation belongs to another run, or another run has begun a later generation.
        """
        document = {"format": FORMAT, "job": self._job, "generation": generation, "step": step, "run": run}
        if not self.store.put_new(fence_name(generation), signed_text(document, self._secret)):
            owner = self.fence_of(generation)
            if owner is None or owner.get("run") != run:
                raise StaleGenerationError(
                    f"generation {generation} of {self._job} belongs to another run of the job, so this run no longer "
                    f"writes to {self.store.url}"
                )
        self.check_not_followed(generation, run)

    def check_not_followed(self, generation: int, run: str) -> None:
        """Check that no other run has begun a generation after `generation`.

        The claim file of a later generation is ignored if this job has signed neither the file nor a checkpoint of that
        generation.

        Raises:
            StaleGenerationError: another run has begun a later generation, or may have, because the claim file of a
                later generation is damaged. After a StaleGenerationError, the caller must not write any more.
        """
        for later in fenced_generations([entry.name for entry in self.store.list("generations/")]):
            if later <= generation:
                continue
            try:
                fence = self._read_fence(later)
            except NotFoundError:
                continue  # this claim file was deleted after the listing
            except CorruptSnapshotError as error:
                files = [parse_file(entry.name) for entry in self.store.list("step-")]
                saved = {file[0] for file in files if file and file[0].generation == later and file[1] == MANIFEST}
                if any(map(self._is_ours, saved)):
                    raise StaleGenerationError(
                        f"the claim file of the later generation {later} is damaged, so generation {generation} no "
                        f"longer writes to {self.store.url}: {error}"
                    ) from error
                continue
            if fence["run"] != run:
                raise StaleGenerationError(
                    f"another run of the job has begun generation {later}, so generation {generation} no longer writes "
                    f"to {self.store.url}"
                )

    def claim(self, found: Found) -> dict[str, Any]:
        """Return the fields `generation`, `step` and `run` from the claim file of a checkpoint's generation.

        Raises:
            NotFoundError: the generation has no claim file.
            CorruptSnapshotError: the claim file is damaged, or not signed by this job.
        """
        return self._read_fence(found.generation, [found])

    def fence_of(self, generation: int) -> dict[str, Any] | None:
        """Return the fields `generation`, `step` and `run` from a generation's claim file.

        Return None if there is no claim file that this job has signed.
        """
        try:
            return self._read_fence(generation)
        except (NotFoundError, CorruptSnapshotError):
            return None

    def _read_fence(self, generation: int, saved: Collection[Found] = ()) -> dict[str, Any]:
        """Return the content of a generation's claim file, verified.

        `saved`: checkpoints of the generation; a signed checkpoint confirms a claim file without a signature.
        """
        where = f"{self.store.url}/{fence_name(generation)}"
        fence = read_document(self.store.get(fence_name(generation), NOTE_BYTES), where)
        if not self._trusting and not self._vouched_for(fence, saved):
            if "signature" not in fence:
                raise CorruptSnapshotError(f"{where}: has no signature")
            check_manifest(fence, self._secret, job=self._job, where=where)
        if type(fence.get("step")) is not int or not isinstance(fence.get("run"), str):
            raise CorruptSnapshotError(f"{where}: has no valid fields `step` and `run`")
        if fence.get("generation") != generation:
            raise CorruptSnapshotError(f"{where}: is the claim file of generation {quote(fence.get('generation'))}")
        return {key: fence[key] for key in ("generation", "step", "run")}

    def _vouched_for(self, fence: Mapping[str, Any], saved: Collection[Found]) -> bool:
        """Return whether a signed checkpoint confirms an unsigned claim file, which earlier versions wrote.

        The generation must have a signed checkpoint, and no checkpoint before the step in the claim file.

        An attacker who forges a claim file gains nothing. A forged claim file can hide checkpoints, but the attacker
        could also delete these checkpoints. A forged claim file can make the job restore abandoned checkpoints, but so
        can the deletion of the true claim file. All checkpoints that count are still signed by the job. A forged claim
        file does not stop a writer (see `check_not_followed`).

        Args:
            fence: content of the claim file.
            saved: checkpoints of the generation.
        """
        if not saved or fence.keys() != {"generation", "step", "run"} or type(fence["step"]) is not int:
            return False
        return bool(fence["step"] <= min(one.step for one in saved)) and any(map(self._is_ours, saved))

    def _is_ours(self, found: Found) -> bool:
        """Return whether this job has signed the manifest of a checkpoint."""
        if found not in self._ours:
            try:
                self.read(found)
            except (NotFoundError, CorruptSnapshotError):
                return False
            self._ours.add(found)
        return True

    # --- writing one ----------------------------------------------------------------------------

    def put_plan(self, folder: str, plan: Plan) -> None:
        self.store.put_new(f"{folder}/{plan_name(plan.digest)}", plan.text.encode())

    def put_record(self, folder: str, node: int, manifests: Sequence[Manifest]) -> None:
        """Announce the snapshots that node `node` will upload.

        Raises:
            CorruptSnapshotError: the node's announcement exists already, with other snapshots.
        """
        if self.store.put_new(f"{folder}/node-{node}.json", signed_text({"manifests": manifests}, self._secret)):
            return
        try:
            announced = self.record(folder, node)
        except NotFoundError:  # the announcement was deleted when the checkpoint was committed
            return
        if [(one["rank"], content_of(one)) for one in announced] != [
            (one["rank"], content_of(one)) for one in manifests
        ]:
            raise CorruptSnapshotError(
                f"{self.store.url}/{folder}/node-{node}.json: exists already, and lists other snapshots than node "
                f"{node} has",
                hint="Check that no other job writes to this place, and who has write access.",
            )

    def put_done(self, folder: str, node: int, macs: Mapping[str, Mac]) -> None:
        """Report that node `node` has uploaded its files. `macs`: MAC of each file, by name."""
        self._put_note(folder, "done", node, macs=dict(macs))

    def macs(self, folder: str, node: int) -> dict[str, Mac]:
        """Return the MACs of the files that a node has uploaded, from its signed note `done-N.json`.

        Raises:
            NotFoundError: the node has not finished its uploads yet, or the checkpoint is committed already.
            CorruptSnapshotError: the note was not written for this checkpoint by a node of this job.
        """
        macs = self._read_note(folder, "done", node).get("macs")
        if not isinstance(macs, dict):
            raise CorruptSnapshotError(f"{self.store.url}/{folder}/done-{node}.json: lists no MACs")
        return dict(macs)

    def put_failed(self, folder: str, node: int, attempt: int = 0) -> None:
        self._put_note(folder, "failed", node, attempt=attempt)

    def put_left(self, folder: str, node: int, attempt: int = 0) -> None:
        self._put_note(folder, "left", node, attempt=attempt)

    def attempt_of(self, folder: str, kind: Literal["failed", "left"], node: int) -> int:
        """Return the number of the upload attempt that a node's note reports; -1 if there is no note of this job."""
        try:
            attempt = self._read_note(folder, kind, node).get("attempt")
        except (NotFoundError, CorruptSnapshotError):
            return -1
        return attempt if isinstance(attempt, int) else -1

    def _put_note(self, folder: str, kind: str, node: int, **fields: object) -> None:
        note = {"format": FORMAT, "job": self._job, "folder": folder, "kind": kind, "node": node, **fields}
        self.store.put_new(f"{folder}/{kind}-{node}.json", signed_text(note, self._secret))

    def _read_note(self, folder: str, kind: str, node: int) -> dict[str, Any]:
        """Return the verified content of a node's note.

        Raises:
            NotFoundError: there is no such note.
            CorruptSnapshotError: the note was not written for this checkpoint by a node of this job.
        """
        name = f"{folder}/{kind}-{node}.json"
        where = f"{self.store.url}/{name}"
        note = read_document(self.fetch(name), where, trusted=True)
        if "signature" not in note:
            raise CorruptSnapshotError(f"{where}: has no signature")
        check_manifest(note, self._secret, job=self._job, where=where)
        if (note.get("folder"), note.get("kind"), note.get("node")) != (folder, kind, node):
            raise CorruptSnapshotError(f"{where}: was written by another node or for another checkpoint")
        return note

    def forget_notes(self, folder: str, node: int) -> None:
        """Delete the small files `failed` and `left` of node `node`, before the node tries the upload again."""
        self.store.delete([f"{folder}/failed-{node}.json", f"{folder}/left-{node}.json"])

    def progress(self, folder: str) -> CheckpointProgress:
        """Return which notes each node has written, from one listing of the folder.

        The notes are not verified here, so anybody may have written them.
        """
        names = [entry.name.rpartition("/")[2] for entry in self.store.list(f"{folder}/")]
        notes = [match for name in names if (match := NOTE.fullmatch(name))]
        of = {
            kind: frozenset(int(note[2]) for note in notes if note[1] == kind)
            for kind in ("node", "done", "failed", "left")
        }
        return CheckpointProgress(of["node"], of["done"], of["failed"], of["left"], MANIFEST in names)

    def record(self, folder: str, node: int) -> list[Manifest]:
        """Return the verified manifests of the snapshots that a node has announced.

        Raises:
            NotFoundError: the node has not announced its snapshots yet, or the checkpoint is committed already.
            CorruptSnapshotError: the announcement was not written for this checkpoint by a node of this job.
        """
        name, found = f"{folder}/node-{node}.json", parse_folder(folder)
        where = f"{self.store.url}/{name}"
        manifests = read_document(self.fetch(name), name, trusted=True).get("manifests")
        if not isinstance(manifests, list) or not all(isinstance(one, dict) for one in manifests):
            raise CorruptSnapshotError(f"{where}: not a list of manifests")
        for one in manifests:
            check_manifest(one, self._secret, job=self._job)
            # check each manifest's commit, because anybody can announce copies of signed manifests of other steps
            its_commit = (one.get("step"), one.get("generation"), one.get("save_id"))
            if found is None or its_commit != (found.step, found.generation, save_id_of(found.generation, found.step)):
                its = f"its snapshot of rank {quote(one.get('rank'))} ({quote(one.get('save_id'))})"
                raise CorruptSnapshotError(f"{where}: {its} belongs to another checkpoint")
            if "rank" not in one:
                raise CorruptSnapshotError(f"{where}: not a list of manifests of snapshots")
        return manifests

    def commit(
        self,
        folder: str,
        manifests: Mapping[int, Manifest],
        files: Mapping[int, str],
        macs: Mapping[str, Mac],
        known: Callable[[str], Plan | None] = lambda digest: None,
        *,
        of_node: bool = False,
    ) -> bool:
        """Write the checkpoint's manifest, which completes the checkpoint.

        Args:
            folder: folder of the checkpoint.
            manifests: manifest of each rank's snapshot.
            files: name of the file with each rank's snapshot; ranks with equal snapshots share a file.
            macs: the MAC of each file, from the node that uploaded the file (see `mac`).
            known: returns the layout plan with a given digest, or None if the plan must be read from the store.
            of_node: whether the checkpoint has only the ranks of one node, on that node's own disk.

        Returns:
            Returns False if another node has already written the manifest.

        Raises:
            CorruptSnapshotError: a file is missing, for example because it was deleted after its upload; or a snapshot
                belongs to another commit.
        """
        one = next(iter(manifests.values()))
        if parse_folder(folder) != Found(one["step"], one["generation"]):
            raise CorruptSnapshotError(
                f"{self.store.url}/{folder} cannot be committed: the snapshots are of {one['save_id']}"
            )
        _check_parts({str(rank): manifest for rank, manifest in manifests.items()}, one, f"{self.store.url}/{folder}")
        prefixes = {name: frozen_part(manifests[rank]) for rank, name in files.items() if name == image_of(rank)}
        frozen = {name: prefix for name, prefix in prefixes.items() if prefix is not None}
        images = {
            file.name: file
            for rank, manifest in manifests.items()
            for file in split_image(files[rank], manifest, frozen.get(files[rank]))
        }
        if missing := images.keys() - macs.keys():
            raise CorruptSnapshotError(
                f"{self.store.url}/{folder} cannot be committed: no node has reported the MAC of {min(missing)}"
            )
        digests = {str(manifest["plan"]) for manifest in manifests.values()}
        plans = {digest: known(digest) or self.read_plan(folder, digest) for digest in digests}
        files_of_torch: dict[str, dict[str, object]] = {}
        all_macs = dict(macs)
        torchs: tuple[tuple[str, bytes], ...] = ()
        part = of_node and len(manifests) < int(one["world_size"])
        if not part:  # plain dcp.load needs the ranks of all nodes
            parts = [
                RankFile(rank, plans[str(each["plan"])], each["values"], files[rank], _prefix(frozen.get(files[rank])))
                for rank, each in sorted(manifests.items())
            ]
            derived = derive(parts, VALUES)
            torchs = (VALUES, derived.values_file), (METADATA_FILE, derived.metadata)
        for name, data in torchs:
            checksum = crc_text(crc64nvme(data))
            self.store.put(f"{folder}/{name}", memoryview(data), checksum)
            files_of_torch[name] = {"nbytes": len(data), "crc64nvme": checksum}
            all_macs[name] = self.mac(memoryview(data))
        document = {
            "format": FORMAT,
            "job": self._job,
            **{key: one[key] for key in ("generation", "step", "save_id", "world_size")},
            "ranks": {str(rank): manifest for rank, manifest in sorted(manifests.items())},
            "files": {str(rank): name for rank, name in sorted(files.items())},
            **({"frozen": {name: _in_manifest(prefix) for name, prefix in frozen.items()}} if frozen else {}),
            "macs": all_macs,
            "derived": files_of_torch,
            **({"of_node": True} if part else {}),
            "nbytes": sum(file.nbytes for file in images.values()),
            "created_at": time.time(),
        }
        signed = signed_text(document, self._secret)
        if len(signed) > DOCUMENT_BYTES:  # readers refuse a longer manifest
            raise HyperpodExtError(
                f"{self.store.url}/{folder}: its manifest would have {len(signed)} bytes, but the limit is "
                f"{DOCUMENT_BYTES}",
                hint="The manifest holds all values of each rank's state that are not tensors. Convert large lists of "
                "numbers to tensors.",
            )
        wanted: dict[str, int | None] = {name: file.nbytes for name, file in images.items()}
        wanted |= {name: len(data) for name, data in torchs}
        there = self._require(folder, wanted | {plan_name(digest): None for digest in digests})
        created = self.store.put_new(f"{folder}/{MANIFEST}", signed)
        self.store.delete([f"{folder}/{name}" for name in there if NOTE.fullmatch(name)])
        return created

    def _require(self, folder: str, wanted: Mapping[str, int | None]) -> Collection[str]:
        """Check that the folder has each wanted file, and return the names of all its files.

        Args:
            folder: folder of the checkpoint.
            wanted: size in bytes of each wanted file, by name; None: any size.

        Raises:
            CorruptSnapshotError: a wanted file is missing, or has another size.
        """
        for last_look in (False, True):
            there = {entry.name.rpartition("/")[2]: entry.nbytes for entry in self.store.list(f"{folder}/")}
            lacking = [
                name for name, nbytes in wanted.items() if nbytes not in (None, there.get(name)) or name not in there
            ]
            if not lacking:
                break
            # list the files twice, because a listing may lack a file while another node replaces it by an equal file
            if last_look:
                name = lacking[0]
                wrong = f"has {there[name]} bytes, not {wanted[name]}" if name in there else "does not exist any more"
                raise CorruptSnapshotError(f"{self.store.url}/{folder} cannot be committed: {name} {wrong}")
        return there.keys()

    # --- retention ------------------------------------------------------------------------------

    def prune(self, keep: int, every_steps: int | None, steps: Collection[int]) -> list[str]:
        """Delete the checkpoints that the retention does not keep, and return the names of their folders.

        Unfinished checkpoints of steps before the newest complete checkpoint are deleted, too, unless a run that was
        restored from an older step may still be uploading them: see `is_passed`. A complete checkpoint counts, and is
        deleted, only if this job has signed its manifest. Only files with names of checkpoint files are deleted.

        Args:
            keep: number of newest checkpoints to keep.
            every_steps: keep each checkpoint whose step is a multiple of this number; None: keep no such checkpoint.
            steps: further steps to keep.
        """
        found = self.found()
        self._ours &= {*found}
        good = [one for one in found if self._is_ours(one)]
        if not good:
            return []
        kept = set(to_keep(good, keep, every_steps, steps))
        files: dict[Found, list[str]] = {}
        names = [entry.name for entry in self.store.list()]
        for name in names:
            if (file := parse_file(name)) is not None:
                files.setdefault(file[0], []).append(name)
        gone, left = [], [good[0].generation]
        for one, its in files.items():
            committed = f"{one.folder}/{MANIFEST}" in its
            may_go = one.step < good[0].step and (self._is_ours(one) if committed else is_passed(one, good))
            if one not in kept and may_go:
                remove(self.store, its)
                gone.append(one.folder)
            else:
                left.append(one.generation)
        self.store.delete([fence_name(number) for number in fenced_generations(names) if number < min(left)])
        return gone


def _prefix(frozen: ImageFile | None) -> tuple[str, int]:
    return (frozen.name, frozen.nbytes) if frozen is not None else ("", 0)


def _in_manifest(frozen: ImageFile) -> dict[str, Any]:
    return {"file": frozen.name, "nbytes": frozen.nbytes, "crc64nvme": frozen.crc64nvme}


def _check_parts(ranks: Mapping[str, Manifest], commit: Mapping[str, Any], where: str) -> None:
    for rank, snapshot in ranks.items():
        try:
            wrong = None if is_part(snapshot, rank, commit) else other_part(snapshot)
        except (KeyError, TypeError) as error:
            wrong = f"invalid: {error!r}"
        if wrong is not None:
            raise CorruptSnapshotError(f"{where}: rank {rank}: its snapshot is {wrong}")
