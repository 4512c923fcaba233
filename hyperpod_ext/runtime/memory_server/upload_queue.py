"""Decides which snapshots of this node are uploaded to a durable tier, in which order, and which uploads are cancelled.

Nothing here starts a thread, or does input or output. The caller must hold the uploader's lock. Dropping an upload task
unpins its snapshots, so that saves may overwrite them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from hyperpod_ext.config.checkpoint import DurableTier
from hyperpod_ext.errors import NotFoundError
from hyperpod_ext.runtime.memory_server.protocol.requests import WhenBusy
from hyperpod_ext.runtime.memory_server.slots.pins import Pin
from hyperpod_ext.runtime.snapshot.manifest import Manifest

_LEFT_BEHIND_S = 30.0
"""Seconds for which uploads of earlier generations still wait for other nodes' parts after a new generation has begun.
The time is short because a lost node never uploads its part."""


@dataclass
class UploadTask:
    """A checkpoint to upload, with the snapshots of this node's ranks."""

    step: int
    generation: int
    save_id: str
    nodes: int
    """Number of nodes that have a part of the checkpoint."""
    node: int
    """This node's number when the checkpoint was saved."""
    pins: dict[int, Pin] = field(default_factory=dict)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    dropped: bool = False
    uploaded: bool = False
    """Whether this node has uploaded its part, so that other nodes may commit the checkpoint."""
    left: dict[int, int] = field(default_factory=dict)
    """Bytes that this node must still upload, by rank."""
    error: str = ""
    """Why the upload failed; empty if it has not failed."""
    attempt: int = 0
    """Number of `UploadNow` requests for this checkpoint; 0 if it is uploaded only because the policy makes it due."""

    def cancelled(self) -> bool:
        return self.dropped or any(pin.cancelled() for pin in self.pins.values())

    def drop(self) -> None:
        self.dropped = True
        self.stack.close()


class UploadQueue:
    """The checkpoints to upload to one tier: checkpoints for which some ranks of this node have no snapshot yet,
    complete checkpoints that wait, and the checkpoint that is being uploaded.

    Args:
        pin: returns a context manager that keeps a snapshot from being overwritten; the arguments are rank and save id.
            `pin` raises NotFoundError if the snapshot was overwritten already.
        node, nodes: this node's number, and the number of nodes.
        owners: number of ranks on this node. A checkpoint is queued once all ranks of the node have sealed their
            snapshots.
    """

    def __init__(
        self,
        tier: DurableTier,
        pin: Callable[[int, str], AbstractContextManager[Pin]],
        *,
        node: int,
        nodes: int,
        owners: int,
        when_busy: WhenBusy,
    ) -> None:
        self._tier, self._pin, self._when_busy = tier, pin, when_busy
        self._node, self._nodes, self._owners = node, nodes, owners
        self._gathering: dict[str, UploadTask] = {}
        self.tasks: list[UploadTask] = []
        self.current: UploadTask | None = None
        self.waiting = False
        """Whether this node's part of the current upload is done, and only other nodes' parts are missing."""
        self.uploaded = ""
        """Save id of the last uploaded checkpoint."""
        self.superseded = self.skipped = 0
        self._asked: set[int] = set()
        self._skipped: set[str] = set()
        self._generation, self._step, self._entered_at = 0, 0, 0.0
        self._stored = False
        self.newest = 0
        """Step of the newest snapshot on this node."""
        self._forsaken = -1
        self._named, self._attempt = "", 0

    # --- the job --------------------------------------------------------------------------------

    def enter(self, generation: int, step: int, stored: bool, now: float, *, again: bool = True) -> None:
        """Begin a new generation after `step`, and drop checkpoints of earlier generations that cannot be completed.

        `again` is true if the generation saves `step` itself once more.
        """
        self._generation, self._step, self._stored, self._entered_at = generation, step, stored, now
        self.newest, self._forsaken = step, -1
        for task in [task for task in self._gathering.values() if task.generation < generation]:
            self._gathering.pop(task.save_id).drop()

        def is_given_up(task: UploadTask) -> bool:
            """Return True if the checkpoint must be dropped, because some node may never have sealed its snapshots."""
            return task.generation < generation and (task.step > step or (again and task.step == step))

        for task in [task for task in self.tasks if is_given_up(task)]:
            self.tasks.remove(task)
            task.drop()
        if self.current is not None and is_given_up(self.current):
            self.current.dropped = True  # the uploading thread unpins the checkpoint's snapshots

    def forsake(self) -> None:
        """Stop waiting for checkpoint parts of a node whose memory server was lost.

        The wait also ends for the step after this node's newest step, because the lost node may have been one step
        ahead.
        """
        self._forsaken = self.newest + 1

    def name(self, save_id: str) -> None:
        """Record an `UploadNow` request for a checkpoint.

        An earlier `forsake` call does not apply to the requested checkpoint, because every node has a part of this
        checkpoint, even a node that has just left the job.
        """
        if save_id != self._named:
            self._named, self._forsaken, self._attempt = save_id, -1, 0
        if (under_way := self.on_its_way(save_id)) is not None:
            self._attempt = under_way.attempt = max(self._attempt, 1)
        else:
            self._attempt += 1

    def resize(self, node: int, nodes: int, owners: int) -> None:
        self._node, self._nodes, self._owners = node, nodes, owners

    def ask(self, step: int) -> None:
        """Upload the snapshots of `step`, even if the policy does not make `step` due."""
        self._asked.add(step)

    # --- snapshots to upload -----------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        if step in self._asked:
            return True
        if self._stored and step == self._step:
            return False
        if self._tier.every_seconds is not None:
            # with an interval in seconds, only `ask` makes a step due, so that all nodes upload the same steps
            return False
        return step % self._tier.every_steps == 0

    def has_arrived(self, step: int, save_id: str) -> bool:
        """Return True if a checkpoint is in the tier: this node uploaded it last, or the job has resumed from it."""
        return save_id == self.uploaded or (self._stored and step == self._step)

    def on_its_way(self, save_id: str) -> UploadTask | None:
        under_way = [self.current] if self.current else []
        return next((task for task in [*under_way, *self.tasks] if task.save_id == save_id), None)

    def take(self, owner: int, manifest: Manifest, wake: Callable[[], None], *, now: bool = False) -> bool:
        """Add one rank's sealed snapshot to its checkpoint. Returns True if the snapshot has completed this node's part
        of the checkpoint, which is now queued.

        `wake` is called when a save needs the snapshot's slot. If `now`, the snapshot is added even during other
        uploads.
        """
        save_id = str(manifest["save_id"])
        if save_id in self._skipped and not now:
            return False  # the snapshot of another rank was skipped, and a checkpoint needs the snapshots of all ranks
        busy = bool(self.tasks) or (self.current is not None and not self.waiting)
        if not now and self._when_busy == "skip" and busy and save_id not in self._gathering:
            self._skipped = {save_id}
            self.skipped += 1
            return False
        generation, step = int(manifest["generation"]), int(manifest["step"])
        task = self._gathering.get(save_id) or UploadTask(step, generation, save_id, self._nodes, self._node)
        self._gathering[save_id] = task
        task.attempt = self._attempt if now else task.attempt
        if owner not in task.pins:
            # NotFoundError: the snapshot was overwritten, so this checkpoint will never be complete
            with contextlib.suppress(NotFoundError):
                task.pins[owner] = task.stack.enter_context(self._pin(owner, save_id))
                task.pins[owner].on_cancel = wake
                task.left[owner] = int(manifest["nbytes"])
        if len(task.pins) < self._owners:
            return False
        self._enqueue(task)
        return True

    def _enqueue(self, task: UploadTask) -> None:
        for older in [each for each in self._gathering.values() if each.step < task.step]:
            self._gathering.pop(older.save_id).drop()  # a rank has sealed no snapshot of this older step
        del self._gathering[task.save_id]
        if self._when_busy == "supersede":
            for waiting in self.tasks:
                waiting.drop()
            self.superseded += len(self.tasks)
            self.tasks.clear()
        self.tasks.append(task)

    # --- the current upload ------------------------------------------------------------------------

    def next(self) -> UploadTask:
        """Remove the first checkpoint from the queue, make it the current upload, and return it."""
        self.current = self.tasks.pop(0)
        return self.current

    def is_passed(self, task: UploadTask, now: float) -> bool:
        """Return True if this node must stop waiting for other nodes' parts of a checkpoint, because a node was lost or
        may have skipped the checkpoint. A node that is still uploading skips a step if a newer step is due."""
        if task.step <= self._forsaken or (self._when_busy != "wait" and self.tasks):
            return True
        return task.generation < self._generation and now > self._entered_at + _LEFT_BEHIND_S
