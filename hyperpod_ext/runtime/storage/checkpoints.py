"""Checkpoints in an object store: what lies where, and what makes one exist.

    NAME-OF-THE-JOB/
      generations/000002.json            claimed once, by one run: fences writers of older ones
      step-000000100-g000002/
        __0_0.distcp __1_0.distcp ...    images, byte for byte as they lay in memory
        plan-3f2a….json                  their layouts, by digest
        __0_1.distcp .metadata           derived, for plain dcp.load
        manifest.json                    signed, created only if absent, last: with it the checkpoint exists

The manifest has a MAC of each file, made by the node that brought it: nothing that lies here is believed without.

Until the manifest is there, `node-N.json` and `done-N.json` tell the nodes of each other; whoever finds
all of them done writes it, so no single node's death can keep a whole checkpoint from counting. `failed-N.json`
and `left-N.json` say that a node's part will not come, so that no other waits for it: it could not bring it, or
its memory was needed for a newer step.
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
    parse_file,
    parse_folder,
    plan_name,
)
from hyperpod_ext.runtime.storage.object_store import ObjectStore, Until, never
from hyperpod_ext.runtime.storage.retention import is_passed, remove, to_keep, without_abandoned
from hyperpod_ext.terminal import quote

_UNPROVED = 10_000
"""Generations up to this one are believed by their names; a job needs as many faults to get there."""


def is_of_node(manifest: Manifest) -> bool:
    """Whether a checkpoint has one node's ranks alone, as on the node's own disk; torch cannot load it."""
    return manifest.get("of_node") is True


def is_part(snapshot: Manifest, rank: str, commit: Mapping[str, Any]) -> bool:
    """Whether a snapshot is that of this rank, and of this commit: the job has signed those of all others, too."""
    same = all(snapshot[key] == commit[key] for key in ("generation", "step", "save_id"))
    return same and str(snapshot["rank"]) == rank


@dataclass(frozen=True, slots=True)
class CheckpointProgress:
    """How far the nodes are with a checkpoint."""

    announced: frozenset[int]
    done: frozenset[int]
    failed: frozenset[int]
    left: frozenset[int]
    complete: bool
    """The manifest is there."""


class Checkpoints:
    """Checkpoints of one job in one store. Several nodes use it at the same time.

    `trusting`: claims are believed without their signatures, by somebody who shows what is there and has no secret.
    """

    def __init__(self, store: ObjectStore, *, job: str, secret: bytes, trusting: bool = False) -> None:
        self.store, self._job, self._secret, self._trusting = store, job, secret, trusting
        self._ours: set[Found] = set()
        """Checkpoints whose manifests were verified; those never change."""

    def until(self, cancelled: Callable[[], bool]) -> Checkpoints:
        """The same, whose calls end with `Cancelled` once that is true."""
        bound = Checkpoints(Until(self.store, cancelled), job=self._job, secret=self._secret)
        bound._ours = self._ours
        return bound

    # --- what is there --------------------------------------------------------------------------

    def found(self) -> list[Found]:
        """Every checkpoint with a manifest, newest first; without those whose steps were given up."""
        names = [entry.name for entry in self.store.list()]
        with_manifest = [file[0] for name in names if (file := parse_file(name)) and file[1] == MANIFEST]
        return without_abandoned(with_manifest, self.starts(fenced_generations(names), with_manifest))

    def starts(
        self,
        fenced: Collection[int],
        found: Collection[Found],
        damaged: dict[int, CorruptSnapshotError] | None = None,
    ) -> dict[int, int]:
        """Step at which each generation began that has saved something.

        The others give nothing up: a run that claimed the place and died has put nothing there to go on from. Nor does
        a generation of which neither the claim nor a checkpoint is signed by this job: anybody may have written both.

        `damaged`: gets what would be raised, by generation, from somebody who goes on without those claims.

        Raises:
            CorruptSnapshotError: one of them has a claim that cannot be believed. Taken for none, it would bring back,
                unsaid, the steps that were given up.
        """
        saved: dict[int, list[Found]] = {}
        for one in found:
            saved.setdefault(one.generation, []).append(one)
        starts = {}
        for number in sorted(saved.keys() & set(fenced) - {min(saved, default=0)}):
            try:
                starts[number] = int(self._read_fence(number, saved[number])["step"])
            except NotFoundError:
                continue  # deleted since it was listed
            except CorruptSnapshotError as error:
                if not self._trusting and not any(map(self._is_ours, saved[number])):
                    continue
                corrupt = CorruptSnapshotError(
                    f"{error.message}: it cannot be told which steps generation {number} gave up",
                    hint="Put that file back from a backup, or use the secret that it was signed with. Once it is "
                    "deleted, what was saved before that generation counts again, the newest step first.",
                )
                if damaged is None:
                    raise corrupt from error
                damaged[number] = corrupt
        return starts

    def read(self, found: Found) -> Manifest:
        """The checkpoint's manifest, verified.

        Raises:
            NotFoundError: there is none.
            CorruptSnapshotError: it is not whole, or not this job's.
        """
        name = f"{found.folder}/{MANIFEST}"
        where = f"{self.store.url}/{name}"
        manifest = read_document(self.fetch(name), where, trusted=True)
        check_manifest(manifest, self._secret, job=self._job, where=where)
        ranks, files, macs = manifest.get("ranks"), manifest.get("files"), manifest.get("macs", {})
        if not (isinstance(ranks, dict) and isinstance(files, dict) and ranks.keys() == files.keys()):
            raise CorruptSnapshotError(f"{where}: the job has signed it, but not as the manifest of a checkpoint")
        if (manifest.get("step"), manifest.get("generation")) != (found.step, found.generation):
            raise CorruptSnapshotError(f"{where}: it is the manifest of {quote(manifest.get('save_id'))}")
        _check_parts(ranks, manifest, where)
        if is_bound(manifest) and (missing := set(files.values()) - set(macs)):
            raise CorruptSnapshotError(f"{where}: it has no MAC of {min(missing)}")
        return manifest

    def mac(self, data: memoryview, cancelled: Callable[[], bool] = never) -> Mac:
        """What `commit` wants of each image: proof that the job has written it."""
        return mac_of(self._secret, data, cancelled)

    def check_image(self, folder: str, manifest: Manifest, rank: str, image: memoryview) -> None:
        """Refuse an image that the job has not written, by the verified manifest of its checkpoint.

        Raises:
            CorruptSnapshotError: with what is wrong.
        """
        name = manifest["files"][rank]
        file = Expected.of(manifest, name, manifest["ranks"][rank])
        file.check(image, self._secret, f"{self.store.url}/{folder}/{name}")

    def read_plan(self, folder: str, digest: str) -> Plan:
        """The layout of one rank's image.

        Raises:
            NotFoundError, CorruptSnapshotError: it is not there, or not what its name says.
        """
        name = f"{folder}/{plan_name(digest)}"
        data = self.store.get(name)
        trusted = not self._trusting and hashlib.sha256(data).hexdigest() == digest
        return read_plan(read_document(data, f"{self.store.url}/{name}", trusted=trusted), digest)

    def fetch(self, name: str) -> bytes:
        """The bytes of a JSON document: a light one, or a heavy one if this job has signed it.

        Raises:
            NotFoundError: there is none.
            CorruptSnapshotError: it is heavy, and not signed by this job.
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
        """Highest generation that has been claimed or has written anything; 0: none.

        One above `_UNPROVED` counts only if this job has signed its claim or a checkpoint of it: others may have made
        up the name.
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
        """Declare that `generation` begins at `step` and belongs to `run`. Needed before its first write.

        Raises:
            StaleGenerationError: it belongs to another run, or a later generation of another run exists.
        """
        document = {"format": FORMAT, "job": self._job, "generation": generation, "step": step, "run": run}
        if not self.store.put_new(fence_name(generation), signed_text(document, self._secret)):
            owner = self.fence_of(generation)
            if owner is None or owner.get("run") != run:
                raise StaleGenerationError(f"generation {generation} of {self._job} belongs to another run of the job")
        self.check_not_followed(generation, run)

    def check_not_followed(self, generation: int, run: str) -> None:
        """Raise when another run has begun a later generation.

        A claim that this job has not signed counts only if the generation has saved something that is signed.

        Raises:
            StaleGenerationError: it has, or its claim is damaged; nothing may be written any more.
        """
        for later in fenced_generations([entry.name for entry in self.store.list("generations/")]):
            if later <= generation:
                continue
            try:
                fence = self._read_fence(later)
            except NotFoundError:
                continue  # deleted since
            except CorruptSnapshotError as error:
                files = [parse_file(entry.name) for entry in self.store.list("step-")]
                saved = {file[0] for file in files if file and file[0].generation == later and file[1] == MANIFEST}
                if any(map(self._is_ours, saved)):
                    raise StaleGenerationError(
                        f"generation {later} has followed generation {generation}, and its claim is damaged: {error}"
                    ) from error
                continue
            if fence["run"] != run:
                raise StaleGenerationError(f"generation {later} of another run has followed generation {generation}")

    def claim(self, found: Found) -> dict[str, Any]:
        """Who began the generation of a checkpoint, and where.

        Raises:
            NotFoundError, CorruptSnapshotError: its claim is not there, or is not this job's.
        """
        return self._read_fence(found.generation, [found])

    def fence_of(self, generation: int) -> dict[str, Any] | None:
        """Who claimed a generation, and where it began; None when nobody has, or the claim is not this job's."""
        try:
            return self._read_fence(generation)
        except (NotFoundError, CorruptSnapshotError):
            return None

    def _read_fence(self, generation: int, saved: Collection[Found] = ()) -> dict[str, Any]:
        """`saved`: what the generation has saved, which may vouch for its claim."""
        where = f"{self.store.url}/{fence_name(generation)}"
        fence = read_document(self.store.get(fence_name(generation), NOTE_BYTES), where)
        if not self._trusting and not self._vouched_for(fence, saved):
            if "signature" not in fence:
                raise CorruptSnapshotError(f"{where}: it is not signed")
            check_manifest(fence, self._secret, job=self._job, where=where)
        if type(fence.get("step")) is not int or not isinstance(fence.get("run"), str):
            raise CorruptSnapshotError(f"{where}: it does not say who began a generation, and where")
        if fence.get("generation") != generation:
            raise CorruptSnapshotError(f"{where}: it is the claim of generation {quote(fence.get('generation'))}")
        return {key: fence[key] for key in ("generation", "step", "run")}

    def _vouched_for(self, fence: Mapping[str, Any], saved: Collection[Found]) -> bool:
        """Whether a claim without a signature, as all were once, stands beside a signed checkpoint of its generation,
        and none of a step before.

        Whoever makes one up can hide no more by it than by deleting checkpoints, and bring back no more than by
        deleting the claim; what is left to go on from is signed. It lets nobody write: see `check_not_followed`.
        """
        if not saved or fence.keys() != {"generation", "step", "run"} or type(fence["step"]) is not int:
            return False
        return bool(fence["step"] <= min(one.step for one in saved)) and any(map(self._is_ours, saved))

    def _is_ours(self, found: Found) -> bool:
        """Whether this job has signed the manifest of a checkpoint."""
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
        """Tell the other nodes which snapshots this one will bring.

        Raises:
            CorruptSnapshotError: they have been told something else in its name.
        """
        if self.store.put_new(f"{folder}/node-{node}.json", signed_text({"manifests": manifests}, self._secret)):
            return
        try:
            announced = self.record(folder, node)
        except NotFoundError:  # the checkpoint was committed since
            return
        if [(one["rank"], content_of(one)) for one in announced] != [
            (one["rank"], content_of(one)) for one in manifests
        ]:
            raise CorruptSnapshotError(
                f"{self.store.url}/{folder}/node-{node}.json: it is not what node {node} has to say: somebody else "
                "has written it"
            )

    def put_done(self, folder: str, node: int, macs: Mapping[str, Mac]) -> None:
        """Tell the other nodes that this one's files are there, and their MACs."""
        self._put_note(folder, "done", node, macs=dict(macs))

    def macs(self, folder: str, node: int) -> dict[str, Mac]:
        """MACs of the files that a node has brought, verified.

        Raises:
            NotFoundError: it has not said yet that it is done, or the checkpoint was committed since.
            CorruptSnapshotError: it is not what a node of this job has said of this checkpoint.
        """
        macs = self._read_note(folder, "done", node).get("macs")
        if not isinstance(macs, dict):
            raise CorruptSnapshotError(f"{self.store.url}/{folder}/done-{node}.json: it has no MACs")
        return dict(macs)

    def put_failed(self, folder: str, node: int, attempt: int = 0) -> None:
        self._put_note(folder, "failed", node, attempt=attempt)

    def put_left(self, folder: str, node: int, attempt: int = 0) -> None:
        self._put_note(folder, "left", node, attempt=attempt)

    def attempt_of(self, folder: str, kind: Literal["failed", "left"], node: int) -> int:
        """The attempt that such a note of a node is of; -1: it was deleted, or nobody of this job has written it."""
        try:
            attempt = self._read_note(folder, kind, node).get("attempt")
        except (NotFoundError, CorruptSnapshotError):
            return -1
        return attempt if isinstance(attempt, int) else -1

    def _put_note(self, folder: str, kind: str, node: int, **fields: object) -> None:
        note = {"format": FORMAT, "job": self._job, "folder": folder, "kind": kind, "node": node, **fields}
        self.store.put_new(f"{folder}/{kind}-{node}.json", signed_text(note, self._secret))

    def _read_note(self, folder: str, kind: str, node: int) -> dict[str, Any]:
        """A note of a node, verified. Raises NotFoundError, CorruptSnapshotError."""
        name = f"{folder}/{kind}-{node}.json"
        where = f"{self.store.url}/{name}"
        note = read_document(self.fetch(name), where, trusted=True)
        if "signature" not in note:
            raise CorruptSnapshotError(f"{where}: it is not signed")
        check_manifest(note, self._secret, job=self._job, where=where)
        if (note.get("folder"), note.get("kind"), note.get("node")) != (folder, kind, node):
            raise CorruptSnapshotError(f"{where}: it is not what node {node} has said of {folder}")
        return note

    def forget_notes(self, folder: str, node: int) -> None:
        """This node tries once more."""
        self.store.delete([f"{folder}/failed-{node}.json", f"{folder}/left-{node}.json"])

    def progress(self, folder: str) -> CheckpointProgress:
        """Nodes that have a note there, by one listing. Strangers may have written some: nothing is verified yet."""
        names = [entry.name.rpartition("/")[2] for entry in self.store.list(f"{folder}/")]
        notes = [match for name in names if (match := NOTE.fullmatch(name))]
        of = {
            kind: frozenset(int(note[2]) for note in notes if note[1] == kind)
            for kind in ("node", "done", "failed", "left")
        }
        return CheckpointProgress(of["node"], of["done"], of["failed"], of["left"], MANIFEST in names)

    def record(self, folder: str, node: int) -> list[Manifest]:
        """What a node has announced, verified.

        Raises:
            NotFoundError: it has not yet, or the checkpoint was committed since.
            CorruptSnapshotError: it is not what a node of this job has said of this checkpoint.
        """
        name, found = f"{folder}/node-{node}.json", parse_folder(folder)
        where = f"{self.store.url}/{name}"
        manifests = read_document(self.fetch(name), name, trusted=True).get("manifests")
        if not isinstance(manifests, list) or not all(isinstance(one, dict) for one in manifests):
            raise CorruptSnapshotError(f"{where}: not a list of manifests")
        for one in manifests:
            check_manifest(one, self._secret, job=self._job)
            # the note itself is not signed, and manifests of other steps lie about for anybody to copy
            its_commit = (one.get("step"), one.get("generation"), one.get("save_id"))
            if found is None or its_commit != (found.step, found.generation, save_id_of(found.generation, found.step)):
                its = f"its snapshot of rank {quote(one.get('rank'))} ({quote(one.get('save_id'))})"
                raise CorruptSnapshotError(f"{where}: {its} is not of this checkpoint")
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
        """Write what makes the checkpoint exist. False: somebody else was quicker, with the same.

        Args:
            macs: of each file, as who has brought it says (see `mac`).
            known: plans that need not be read from the store.
            of_node: it has one node's ranks, on the node's own disk.

        Raises:
            CorruptSnapshotError: a file of it is not there, as when somebody has deleted it since it was brought; or
                the snapshots are not all of this commit.
        """
        one = next(iter(manifests.values()))
        if parse_folder(folder) != Found(one["step"], one["generation"]):
            raise CorruptSnapshotError(f"{self.store.url}/{folder} cannot be committed: it would be {one['save_id']}")
        _check_parts({str(rank): manifest for rank, manifest in manifests.items()}, one, f"{self.store.url}/{folder}")
        if missing := set(files.values()) - macs.keys():
            raise CorruptSnapshotError(f"{self.store.url}/{folder}: nobody has said the MAC of {min(missing)}")
        digests = {str(manifest["plan"]) for manifest in manifests.values()}
        plans = {digest: known(digest) or self.read_plan(folder, digest) for digest in digests}
        files_of_torch: dict[str, dict[str, object]] = {}
        all_macs = dict(macs)
        torchs: tuple[tuple[str, bytes], ...] = ()
        part = of_node and len(manifests) < int(one["world_size"])
        if not part:  # torch cannot load a part
            parts = [RankFile(r, plans[str(m["plan"])], m["values"], files[r]) for r, m in sorted(manifests.items())]
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
            "macs": all_macs,
            "derived": files_of_torch,
            **({"of_node": True} if part else {}),
            "nbytes": sum({files[rank]: int(m["nbytes"]) for rank, m in manifests.items()}.values()),
            "created_at": time.time(),
        }
        signed = signed_text(document, self._secret)
        if len(signed) > DOCUMENT_BYTES:  # nobody would read it
            raise HyperpodExtError(
                f"{self.store.url}/{folder}: its manifest would have {len(signed)} bytes of at most {DOCUMENT_BYTES}",
                hint="It holds what is no tensor of each rank's state: make large lists of numbers tensors.",
            )
        wanted: dict[str, int | None] = {files[rank]: int(m["nbytes"]) for rank, m in manifests.items()}
        wanted |= {name: len(data) for name, data in torchs}
        there = self._require(folder, wanted | {plan_name(digest): None for digest in digests})
        created = self.store.put_new(f"{folder}/{MANIFEST}", signed)
        self.store.delete([f"{folder}/{name}" for name in there if NOTE.fullmatch(name)])
        return created

    def _require(self, folder: str, wanted: Mapping[str, int | None]) -> Collection[str]:
        """Names of the files in a folder, which must have those that are wanted, of that many bytes."""
        for last_look in (False, True):
            there = {entry.name.rpartition("/")[2]: entry.nbytes for entry in self.store.list(f"{folder}/")}
            lacking = [
                name for name, nbytes in wanted.items() if nbytes not in (None, there.get(name)) or name not in there
            ]
            if not lacking:
                break
            # a directory's listing may lack what another node, which commits too, renames onto its equal meanwhile
            if last_look:
                name = lacking[0]
                wrong = f"has {there[name]} bytes, not {wanted[name]}" if name in there else "is not there any more"
                raise CorruptSnapshotError(f"{self.store.url}/{folder} cannot be committed: {name} {wrong}")
        return there.keys()

    # --- retention ------------------------------------------------------------------------------

    def prune(self, keep: int, every_steps: int | None, steps: Collection[int]) -> list[str]:
        """Delete what need not be kept, and what was left unfinished before the newest; returns the folders.

        Checkpoints count, and go, only if this job has signed their manifests, and only files with the names of a
        checkpoint's. What another run is bringing, which went back to an older step, is not unfinished: see
        `is_passed`.
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


def _check_parts(ranks: Mapping[str, Manifest], commit: Mapping[str, Any], where: str) -> None:
    for rank, snapshot in ranks.items():
        try:
            other = f"of rank {quote(snapshot['rank'])}, {quote(snapshot['save_id'])}"
            wrong = None if is_part(snapshot, rank, commit) else other
        except (KeyError, TypeError) as error:
            wrong = f"none: {error!r}"
        if wrong is not None:
            raise CorruptSnapshotError(f"{where}: rank {rank}: its snapshot is {wrong}")
