"""Uploads one checkpoint to a durable tier: uploads the snapshots of this node's ranks (the node's part), exchanges
notes (small files in the tier) with other nodes, and commits the checkpoint.

All code here runs in the single thread of an `Uploader`. The thread waits for other nodes and S3, but never for a
worker.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Set
from typing import Literal, NamedTuple

from hyperpod_ext.errors import CorruptSnapshotError, HyperpodExtError, NotFoundError
from hyperpod_ext.runtime.memory_server.slots.regions import Regions
from hyperpod_ext.runtime.memory_server.slots.slots import State
from hyperpod_ext.runtime.memory_server.upload_queue import UploadQueue, UploadTask
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.manifest import Manifest
from hyperpod_ext.runtime.storage.checkpoints import CheckpointProgress, Checkpoints
from hyperpod_ext.runtime.storage.mac import Mac
from hyperpod_ext.runtime.storage.names import folder_of, image_of, parse_folder
from hyperpod_ext.runtime.storage.object_store import Cancelled
from hyperpod_ext.runtime.storage.upload_split import ImageFile, frozen_part, partition_uploads, split_image

_POLL_S = (0.02, 1.0)
_DEADLINE_S = 600.0
"""Minimum number of seconds to wait for other nodes' parts of a checkpoint."""
_TURN_S, _LAST_TURN_S = 2.0, 30.0
"""A node waits `_TURN_S` seconds times its node number, at most `_LAST_TURN_S`, before it commits a checkpoint that no
lower-numbered node has committed. `_LAST_TURN_S` is far below `_DEADLINE_S`."""
_SLOWEST_BYTES_S = 5e6
"""Assumed minimum upload rate of a node, in bytes per second, from which the time to wait for its part is computed."""


class _Written(NamedTuple):
    """A file in a tier with frozen parameters (parameters that training does not change)."""

    folder: str
    file: str
    generation: int
    mac: Mac


class Upload:
    """Uploads the checkpoints in a queue to one tier.

    Args:
        regions: this node's own snapshots.
        plan_of: returns a layout by its digest.
        of_node: whether each node writes its own checkpoint, with only its own ranks.
        on_bytes: called with the number of bytes just sent; a negative number for bytes that must be sent again.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        regions: Regions,
        plan_of: Callable[[str], Plan | None],
        queue: UploadQueue,
        *,
        on_bytes: Callable[[int], None],
        of_node: bool = False,
    ) -> None:
        self._of_node = of_node
        self._checkpoints, self._regions, self._plan_of, self._queue = checkpoints, regions, plan_of, queue
        self._on_bytes = on_bytes
        self.entered: dict[int, tuple[int, str]] = {}
        """By generation: the step after which the generation began, and the name of its run."""
        self._fenced: set[int] = set()
        self._frozen: dict[tuple[int, str], _Written] = {}
        """Files of frozen parameters that this node uploaded for the last checkpoint, by length and CRC64-NVME."""
        self._reported: set[str] = set()
        """Save ids that this node has already reported as failed or cancelled."""
        self.wake = threading.Event()
        """Event that other threads set after a change that may end the wait for other nodes."""

    def bring(self, task: UploadTask) -> bool:
        """Upload this node's part of a checkpoint, and wait for the commit. Returns whether this node committed the
        checkpoint.

        Raises:
            Cancelled: a newer snapshot needs the memory of a snapshot in this upload, or the wait for other nodes'
                parts was cancelled.
            HyperpodExtError: the checkpoint could not be uploaded or committed; earlier checkpoints are unchanged.
        """
        checkpoints, folder = self._checkpoints.until(task.cancelled), folder_of(task.step, task.generation)
        if not all(self._regions.begin_copy(pin) for pin in task.pins.values()):
            raise Cancelled
        self._fence(task.generation, checkpoints)
        for digest in {str(pin.manifest["plan"]) for pin in task.pins.values()}:
            plan = self._plan_of(digest)
            assert plan is not None, "a snapshot is sealed only with a plan that is known"
            checkpoints.put_plan(folder, plan)
        manifests = [pin.manifest for _, pin in sorted(task.pins.items())]
        if task.save_id in self._reported:
            checkpoints.forget_notes(folder, task.node)
        if task.nodes > 1:
            checkpoints.put_record(folder, task.node, manifests)
        records = self._all_records(task, folder, checkpoints)
        everyone = {int(manifest["rank"]): manifest for each in records.values() for manifest in each}
        of = max((int(manifest["world_size"]) for manifest in everyone.values()), default=0)
        if len(everyone) < of and not self._of_node:  # some nodes have left the job since the save
            raise HyperpodExtError(f"only {len(everyone)} of {of} ranks have announced parts of step {task.step}")
        files, uploads = partition_uploads(records)
        # if snapshots of several ranks are equal, only one node uploads them
        task.left = {rank: int(task.pins[rank].manifest["nbytes"]) for rank in uploads[task.node]}
        macs: dict[str, Mac] = {}
        for rank in uploads[task.node]:
            macs |= self._upload(task, folder, rank)
            del task.left[rank]
        self._frozen = {part: written for part, written in self._frozen.items() if written.folder == folder}
        task.stack.close()  # this call unpins the snapshots, so that workers may overwrite the slots
        checkpoints = self._checkpoints.until(lambda: task.dropped)
        if task.nodes > 1:
            checkpoints.put_done(folder, task.node, macs)
            task.uploaded = True
        most = max(sum(int(everyone[rank]["nbytes"]) for rank in ranks) for ranks in uploads.values())
        committed = self._see_committed(task, folder, records.keys(), everyone, files, macs, checkpoints, most)
        if self._of_node and not committed:
            self._check_own(folder, everyone, checkpoints)
        for manifest in manifests:
            self._regions.mark(int(manifest["rank"]), task.save_id, State.DURABLE)
        return committed

    def _check_own(self, folder: str, everyone: Mapping[int, Manifest], checkpoints: Checkpoints) -> None:
        """Raise HyperpodExtError if the checkpoint that was committed in `folder` belongs to another node."""
        found = parse_folder(folder)
        there = checkpoints.read(found)["ranks"] if found is not None else {}
        if there.keys() != {str(rank) for rank in everyone}:
            raise HyperpodExtError(
                f"{self._checkpoints.store.url}/{folder} has the ranks {', '.join(sorted(there))} of another "
                "node, because the nodes share this folder",
                hint="Set the tier's path to a folder on each node's own disk, or use `kind: file` for shared storage.",
            )

    # --- notes to other nodes -------------------------------------------------------------------

    def report_failed(self, task: UploadTask) -> None:
        """Write a note to the tier that this node will not upload its part, so that no other node waits for the part.

        If the note cannot be written, other nodes wait for the part until their time limit.
        """
        if task.generation in self.entered and task.generation not in self._fenced:
            return  # write nothing to the checkpoint's folder, which may belong to another run
        if task.nodes > 1:
            self._report(task, self._checkpoints.put_failed)

    def report_left(self, task: UploadTask) -> None:
        """Write a note to the tier that this node cancelled its upload, because a new save needed the snapshot's slot.

        Without this note, a node that still has its snapshot would wait for this node until the next step is due. No
        note is needed for a step that a new generation drops, because all nodes drop it.
        """
        if task.nodes > 1 and not task.uploaded and not task.dropped:
            self._report(task, self._checkpoints.put_left, fence=True)

    def _report(self, task: UploadTask, put: Callable[[str, int, int], None], *, fence: bool = False) -> None:
        folder = folder_of(task.step, task.generation)
        with contextlib.suppress(HyperpodExtError):
            if fence:
                self._fence(task.generation, self._checkpoints)
            if task.save_id in self._reported:
                self._checkpoints.forget_notes(folder, task.node)
            put(folder, task.node, task.attempt)
        self._reported.add(task.save_id)

    def _fence(self, generation: int, checkpoints: Checkpoints) -> None:
        """Write the claim file of `generation` to the tier, once per generation, even if a newer generation has
        begun."""
        if generation in self.entered and generation not in self._fenced:
            checkpoints.fence(generation, *self.entered[generation])
            self._fenced.add(generation)

    # --- the parts of an upload, in order -------------------------------------------------------

    def _all_records(self, task: UploadTask, folder: str, checkpoints: Checkpoints) -> dict[int, list[Manifest]]:
        if task.nodes == 1:
            return {task.node: [pin.manifest for _, pin in sorted(task.pins.items())]}
        found: dict[int, list[Manifest]] = {}

        strange: set[int] = set()
        """Numbers of nodes whose record in the tier was not written by this job."""

        def complete() -> bool:
            progress = self._progress(task, folder, checkpoints)
            for node in sorted(progress.announced - found.keys() - strange):
                try:
                    found[node] = checkpoints.record(folder, node)
                except CorruptSnapshotError:
                    if node < task.nodes:
                        raise
                    strange.add(node)
            return len(found) >= task.nodes

        self._poll(
            lambda: task.cancelled() or self._queue.is_passed(task, time.monotonic()),
            complete,
            f"not every node has sealed step {task.step}",
            _DEADLINE_S,
        )
        return found

    def _upload(self, task: UploadTask, folder: str, rank: int) -> dict[str, Mac]:
        """Upload one rank's snapshot and return the MACs of the uploaded files."""
        pin = task.pins[rank]
        macs: dict[str, Mac] = {}

        def handed_over(nbytes: int) -> None:
            task.left[rank] -= nbytes
            self._on_bytes(nbytes)

        frozen = frozen_part(pin.manifest)
        if frozen is not None and (mac := self._copy_frozen(task, folder, frozen)) is not None:
            macs[frozen.name] = mac
            task.left[rank] -= frozen.nbytes
        if not self._regions.begin_reading(pin):
            raise Cancelled
        with pin.data as data:
            for file in split_image(image_of(rank), pin.manifest, frozen):
                if file.name not in macs:
                    with data[file.start : file.start + file.nbytes] as part:
                        macs[file.name] = self._put(task, f"{folder}/{file.name}", part, file.crc64nvme, handed_over)
                if file is frozen:
                    written = _Written(folder, file.name, task.generation, macs[file.name])
                    self._frozen[file.nbytes, file.crc64nvme] = written
        return macs

    def _put(
        self, task: UploadTask, name: str, data: memoryview, crc64nvme: str, on_bytes: Callable[[int], None]
    ) -> Mac:
        mac = self._checkpoints.mac(data, task.cancelled)
        self._checkpoints.store.put(name, data, crc64nvme, cancelled=task.cancelled, on_bytes=on_bytes)
        return mac

    def _copy_frozen(self, task: UploadTask, folder: str, file: ImageFile) -> Mac | None:
        """Copy, inside the tier, a file of frozen parameters that this node has already uploaded. Returns the file's
        MAC.

        Returns None if the caller must upload the bytes, because the tier no longer has the file or the file was
        uploaded in an earlier generation. Uploading the bytes once per generation keeps a file that was damaged in the
        tier from being copied into every later checkpoint.
        """
        known = self._frozen.get((file.nbytes, file.crc64nvme))
        if known is None or known.generation != task.generation:
            return None
        source, name = f"{known.folder}/{known.file}", f"{folder}/{file.name}"
        copied = self._checkpoints.store.copy(source, name, file.nbytes, file.crc64nvme, cancelled=task.cancelled)
        return known.mac if copied else None

    def _see_committed(
        self,
        task: UploadTask,
        folder: str,
        nodes: Set[int],
        everyone: dict[int, Manifest],
        files: dict[int, str],
        macs: Mapping[str, Mac],
        checkpoints: Checkpoints,
        nbytes: int,
    ) -> bool:
        """Wait until all nodes' parts are uploaded and the checkpoint is committed. Returns whether this node committed
        the checkpoint.

        Node 0 commits as soon as all parts are uploaded. Every other node commits after a delay, if no lower-numbered
        node has committed the checkpoint.

        Args:
            nodes: numbers of the nodes whose verified records in the tier announce their parts.
            nbytes: number of bytes of the node that uploads the most.
        """
        timeout_s = time.monotonic() + min(_TURN_S * task.node, _LAST_TURN_S)
        limit_s = max(_DEADLINE_S, nbytes / _SLOWEST_BYTES_S)
        by_us = False

        def committed() -> bool:
            nonlocal by_us
            known = dict(macs)
            if task.nodes > 1:
                progress = self._progress(task, folder, checkpoints)
                if progress.complete:
                    return True
                if not nodes <= progress.done:
                    return False
                # let a lower-numbered node commit, unless it may already have begun to upload a newer step
                if time.monotonic() < timeout_s and not self._queue.is_passed(task, time.monotonic()):
                    return False
                try:
                    for node in nodes - {task.node}:
                        known |= checkpoints.macs(folder, node)
                except NotFoundError:  # another node has just committed the checkpoint
                    return False
            if task.generation in self.entered:  # another run may have begun during the upload
                checkpoints.check_not_followed(task.generation, self.entered[task.generation][1])
            by_us = checkpoints.commit(folder, everyone, files, known, self._plan_of, of_node=self._of_node)
            return True

        # a newer step ends this wait; a save that needs a slot does not, because the slots are released already
        self._poll(
            lambda: task.dropped or self._queue.is_passed(task, time.monotonic()),
            committed,
            f"not every node has uploaded its part of step {task.step}",
            limit_s,
        )
        return by_us

    def _progress(self, task: UploadTask, folder: str, checkpoints: Checkpoints) -> CheckpointProgress:
        progress = checkpoints.progress(folder)
        if progress.complete:
            return progress

        # ignore notes of earlier attempts, which a node deletes only when it begins its next attempt
        def is_of_this(kind: Literal["failed", "left"], node: int) -> bool:
            return checkpoints.attempt_of(folder, kind, node) >= task.attempt

        for node in sorted(progress.failed - {task.node}):
            if is_of_this("failed", node):
                raise HyperpodExtError(f"node {node} could not upload its part of step {task.step}")
        if any(is_of_this("left", node) for node in progress.left - {task.node}):
            raise Cancelled
        return progress

    def _poll(self, given_up: Callable[[], bool], condition: Callable[[], bool], failure: str, limit_s: float) -> None:
        wait, deadline = _POLL_S[0], time.monotonic() + limit_s
        self._queue.waiting = True
        try:
            while True:
                self.wake.clear()
                if condition():
                    return
                if given_up():
                    raise Cancelled
                if time.monotonic() > deadline:
                    raise HyperpodExtError(f"{self._checkpoints.store.url}: {failure} after {limit_s:.0f} s")
                self.wake.wait(wait)
                wait = min(wait * 2, _POLL_S[1])
        finally:
            self._queue.waiting = False
