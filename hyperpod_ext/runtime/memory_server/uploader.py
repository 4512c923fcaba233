"""Uploads snapshots from this node's memory to a durable tier, in one thread per tier and without the workers.

A checkpoint whose snapshots are sealed on every node reaches the tier even if the workers or the whole job die.
`upload_queue.py` decides which checkpoints are uploaded, and in which order. `upload.py` uploads a single checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from hyperpod_ext.config.checkpoint import DurableTier
from hyperpod_ext.errors import HyperpodExtError, StaleGenerationError
from hyperpod_ext.runtime.memory_server.protocol.requests import WhenBusy
from hyperpod_ext.runtime.memory_server.slots.pins import Hold
from hyperpod_ext.runtime.memory_server.slots.regions import Regions
from hyperpod_ext.runtime.memory_server.upload import Upload
from hyperpod_ext.runtime.memory_server.upload_queue import UploadQueue, UploadTask
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.manifest import Manifest
from hyperpod_ext.runtime.storage.checkpoints import Checkpoints
from hyperpod_ext.runtime.storage.object_store import Cancelled
from hyperpod_ext.runtime.storage.open import open_tier

_REMEMBERED = 100
"""Number of uploaded steps to remember, so that an older step is known if a new generation drops the newest steps."""


class Uploader:
    """Uploads checkpoints to one durable tier.

    Args:
        tier: location of the tier, interval between checkpoints, and number of checkpoints to keep.
        regions: this node's own snapshots.
        plan_of: returns the layout with a digest, or None if no layout has this digest.
        node, nodes: this node's number, and the number of nodes.
        owners: number of ranks on this node. A checkpoint is queued once all ranks of the node have sealed their
            snapshots.
    """

    def __init__(
        self,
        tier: DurableTier,
        regions: Regions,
        plan_of: Callable[[str], Plan | None],
        *,
        job: str,
        secret: bytes,
        node: int,
        nodes: int,
        owners: int,
        when_busy: WhenBusy,
    ) -> None:
        tier = tier.on(node)
        self.tier, self.url = tier, tier.url(job)
        self.checkpoints = Checkpoints(open_tier(tier, job), job=job, secret=secret)
        self._queue = UploadQueue(
            tier,
            lambda owner, save_id: regions.pin(owner, save_id, f"upload {self.url}", hold=Hold.WAITING),
            node=0 if tier.on_node else node,
            nodes=1 if tier.on_node else nodes,
            owners=owners,
            when_busy=when_busy,
        )
        self._upload = Upload(
            self.checkpoints, regions, plan_of, self._queue, on_bytes=self._count, of_node=tier.on_node
        )
        self._changed = threading.Condition()
        self._lost: UploadTask | None = None
        """The last checkpoint whose upload failed or was cancelled."""
        self._steps: list[int] = []
        """Steps in the tier, in the order in which they were uploaded."""
        self._status: dict[str, Any] = {
            "tier": self.url,
            "bytes_sent": 0,
            "seconds": 0.0,
            "done": 0,
            "superseded": 0,
            "skipped": 0,
            "failed": 0,
            "last_error": None,
            "taken_over": False,
        }
        self.on_change: Callable[[Uploader], None] = lambda uploader: None
        """Function that is called in the uploading thread after a checkpoint was uploaded or deleted."""
        threading.Thread(target=self._work, name=f"upload {self.url}", daemon=True).start()

    # --- due checkpoints ------------------------------------------------------------------------

    def enter(self, generation: int, step: int, run: str, stored: Collection[str], *, again: bool = True) -> None:
        """Begin a new generation after `step`, and drop checkpoints of earlier generations that cannot be completed.

        Args:
            run: name of this run, which distinguishes it from other runs of jobs with the same name.
            stored: URLs of the tiers that already have `step`, to which `step` is not uploaded again.
            again: see `UploadQueue.enter`.
        """
        with self._changed:
            self._upload.entered[generation] = step, run
            self._queue.enter(generation, step, self.url in stored, time.monotonic(), again=again)
            self._steps = [its for its in self._steps if its <= step]  # the new generation drops later steps
            if self.url in stored and step not in self._steps:
                self._steps.append(step)
            self._upload.wake.set()

    def forsake(self) -> None:
        """Stop waiting for checkpoint parts of a node whose memory server was lost or replaced."""
        with self._changed:
            self._queue.forsake()
            self._upload.wake.set()

    def resize(self, node: int, nodes: int, owners: int) -> None:
        """Set this node's number, the number of nodes, and the number of ranks of this node after a resize."""
        with self._changed:
            self._queue.resize(*((0, 1) if self.tier.on_node else (node, nodes)), owners)

    def ask(self, step: int) -> None:
        """Upload the snapshots of `step`, even if the policy does not make `step` due."""
        with self._changed:
            self._queue.ask(step)

    def sealed(self, owner: int, manifest: Manifest) -> None:
        """Record that a rank's snapshot is sealed. If the snapshot's step is due, pin the snapshot at once, so that no
        save overwrites it."""
        with self._changed:
            self._queue.newest = max(self._queue.newest, int(manifest["step"]))
            if self._queue.is_due(int(manifest["step"])):
                self._take(owner, manifest)

    def take_now(self, manifests: list[Manifest]) -> None:
        """Upload the given snapshots of one step, one for each rank of this node, even if the step is not due.

        Does nothing for snapshots that are already uploaded or queued.
        """
        with self._changed:
            for save_id in {str(manifest["save_id"]) for manifest in manifests}:
                self._queue.name(save_id)
            for manifest in manifests:
                step, save_id = int(manifest["step"]), str(manifest["save_id"])
                if not self._queue.has_arrived(step, save_id) and self._queue.on_its_way(save_id) is None:
                    self._take(int(manifest["rank"]), manifest, now=True)

    def progress_of(self, manifests: list[Manifest]) -> dict[str, Any]:
        """Return the upload progress of the given snapshots of one step, with the ranks and bytes not uploaded yet."""
        with self._changed:
            one = manifests[0]
            step, save_id = int(one["step"]), str(one["save_id"])
            arrived = self._queue.has_arrived(step, save_id)
            task = self._queue.on_its_way(save_id)
            if task is None and self._lost is not None and self._lost.save_id == save_id:
                task = self._lost
            left = {int(manifest["rank"]): int(manifest["nbytes"]) for manifest in manifests}
            if arrived or task is not None:
                left = {} if arrived or task is None else dict(task.left)
            return {
                "tier": self.url,
                "arrived": arrived,
                "newest_step": self._newest,
                "left_ranks": sorted(left),
                "left_bytes": sum(left.values()),
                "error": task.error if task is not None and not arrived else "",
            }

    def _take(self, owner: int, manifest: Manifest, *, now: bool = False) -> None:
        if self._queue.take(owner, manifest, self._upload.wake.set, now=now):
            self._changed.notify_all()
            self._upload.wake.set()

    # --- the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue.tasks)
                task = self._queue.next()
            began = time.monotonic()
            try:
                committed = self._upload.bring(task)
                self._queue.uploaded = task.save_id
                self._status["done"] += 1
                self._steps = [*self._steps[-_REMEMBERED:], task.step]
                self._status["seconds"] += time.monotonic() - began
                if committed:  # the node that commits also deletes old checkpoints
                    self._prune(task)
                self.on_change(self)
            except Cancelled:
                self._status["superseded"] += 1
                self._lost, task.error = task, "the upload was cancelled, on this node or on another node"
                task.stack.close()
                self._upload.report_left(task)
            # catch any error: without this thread, nothing would be uploaded to the tier
            except Exception as error:
                self._note(task, error)
                self._upload.report_failed(task)
            finally:
                task.stack.close()
                with self._changed:
                    self._queue.current = None
                    self._changed.notify_all()

    def _prune(self, task: UploadTask) -> None:
        """Delete old checkpoints. An error is only recorded, because each commit tries again to delete old checkpoints.

        Deletes nothing if another run of the job has begun, because the other run may resume from an old checkpoint.
        """
        try:
            if (entered := self._upload.entered.get(task.generation)) is not None:
                self.checkpoints.check_not_followed(task.generation, entered[1])
            self.checkpoints.prune(self.tier.keep, self.tier.keep_every_steps, self.tier.keep_steps)
        except Exception as error:
            why = _in_words(error)
            self._status["last_error"] = f"checkpoints older than step {task.step} were not deleted: {why}"

    def _note(self, task: UploadTask, error: Exception) -> None:
        self._status["failed"] += 1
        self._status["taken_over"] |= isinstance(error, StaleGenerationError) and not self.tier.on_node
        message = _in_words(error)
        self._status["last_error"] = f"step {task.step}: {message}"
        self._lost, task.error = task, message

    def _count(self, nbytes: int) -> None:
        self._status["bytes_sent"] += nbytes

    # --- status ---------------------------------------------------------------------------------

    @property
    def status(self) -> dict[str, Any]:
        """Counters, the newest uploaded step, and the last error of the tier."""
        superseded = self._status["superseded"] + self._queue.superseded
        counts = {"superseded": superseded, "skipped": self._queue.skipped}
        return self._status | counts | {"durable_step": self._newest}

    @property
    def _newest(self) -> int | None:
        """Newest step that this node knows to be in the tier, and that no later generation has dropped."""
        return max(self._steps, default=None)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until all due checkpoints are uploaded or have failed. Returns False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue.tasks and self._queue.current is None, timeout_s)


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, HyperpodExtError) else repr(error)
