"""Which snapshots of this node a durable tier is to get, in which order, and which give way. No thread, no store.

The caller holds the uploader's lock; what is pinned here is let go where it is dropped.
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
"""How long after a fault other nodes are waited for with what was due before it: one that was lost never brings it."""


@dataclass
class UploadTask:
    """One checkpoint that is due."""

    step: int
    generation: int
    save_id: str
    nodes: int
    """Nodes that bring a part of it."""
    node: int
    """This node's number among them, whatever it is called by now."""
    pins: dict[int, Pin] = field(default_factory=dict)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    dropped: bool = False
    brought: bool = False
    """This node's part is there: others may commit it."""
    left: dict[int, int] = field(default_factory=dict)
    """Bytes of each rank's image that this node has yet to bring."""
    error: str = ""
    """Why it will not arrive."""
    attempt: int = 0
    """0: it is due by the policy; else how often all nodes have been asked for it, one after the other."""

    def cancelled(self) -> bool:
        return self.dropped or any(pin.cancelled() for pin in self.pins.values())

    def drop(self) -> None:
        self.dropped = True
        self.stack.close()


class UploadQueue:
    """What is gathered from the ranks, what waits in line, and what is under way.

    Args:
        pin: keeps the snapshot of a rank and save id in its slot for as long as the context is open; raises
            NotFoundError when it is overwritten already.
        node, nodes: this node's number, and how many there are.
        owners: ranks of this node; a checkpoint is due here once all of them are sealed.
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
        """What is under way waits for other nodes; this one could go on."""
        self.brought = ""
        """Save id of the newest that has arrived."""
        self.superseded = self.skipped = 0
        self._asked: set[int] = set()
        self._skipped: set[str] = set()
        self._generation, self._step, self._entered_at = 0, 0, 0.0
        self._stored = False
        self.newest = 0
        """Step of the newest snapshot here."""
        self._forsaken = -1
        self._named, self._attempt = "", 0

    # --- the job --------------------------------------------------------------------------------

    def enter(self, generation: int, step: int, stored: bool, now: float, *, again: bool = True) -> None:
        """A generation begins at `step`; checkpoints that earlier ones left incomplete never come. `again`: it saves
        `step` itself once more."""
        self._generation, self._step, self._stored, self._entered_at = generation, step, stored, now
        self.newest, self._forsaken = step, -1
        for task in [task for task in self._gathering.values() if task.generation < generation]:
            self._gathering.pop(task.save_id).drop()

        def is_given_up(task: UploadTask) -> bool:
            """Some node may never have sealed it, and none may wait for it."""
            return task.generation < generation and (task.step > step or (again and task.step == step))

        for task in [task for task in self.tasks if is_given_up(task)]:
            self.tasks.remove(task)
            task.drop()
        if self.current is not None and is_given_up(self.current):
            self.current.dropped = True  # its thread lets go of the memory

    def forsake(self) -> None:
        """The memory of another node is lost. Its ranks may have been a step further than those here: unless its part
        of that, or of an earlier one, is there already, it may never come."""
        self._forsaken = self.newest + 1

    def name(self, save_id: str) -> None:
        """The coordinator wants this one, as every node holds its part: also those that have just left the job. Who is
        lost from here on does not bring it."""
        if save_id != self._named:
            self._named, self._forsaken, self._attempt = save_id, -1, 0
        if (under_way := self.on_its_way(save_id)) is not None:
            self._attempt = under_way.attempt = max(self._attempt, 1)
        else:
            self._attempt += 1

    def resize(self, node: int, nodes: int, owners: int) -> None:
        self._node, self._nodes, self._owners = node, nodes, owners

    def ask(self, step: int) -> None:
        """Have the snapshot of `step` uploaded, too, whether it is due by the policy or not."""
        self._asked.add(step)

    # --- what comes in --------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        if step in self._asked:
            return True
        if self._stored and step == self._step:
            return False
        if self._tier.every_seconds is not None:
            return False  # the steps to take are asked for, the same on all nodes
        return step % self._tier.every_steps == 0

    def has_arrived(self, step: int, save_id: str) -> bool:
        """Or was there before, as what the job went on from."""
        return save_id == self.brought or (self._stored and step == self._step)

    def on_its_way(self, save_id: str) -> UploadTask | None:
        under_way = [self.current] if self.current else []
        return next((task for task in [*under_way, *self.tasks] if task.save_id == save_id), None)

    def take(self, owner: int, manifest: Manifest, wake: Callable[[], None], *, now: bool = False) -> bool:
        """A snapshot of one rank was sealed. True: with it a checkpoint of this node is whole, and in line.

        `wake` is called when its memory is needed. `now`: take it whatever else is on its way.
        """
        save_id = str(manifest["save_id"])
        if save_id in self._skipped and not now:
            return False  # a checkpoint lacks no rank: what was left out for one is for all
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
            with contextlib.suppress(NotFoundError):  # overwritten already: then this checkpoint will not be
                task.pins[owner] = task.stack.enter_context(self._pin(owner, save_id))
                task.pins[owner].on_cancel = wake
                task.left[owner] = int(manifest["nbytes"])
        if len(task.pins) < self._owners:
            return False
        self._line_up(task)
        return True

    def _line_up(self, task: UploadTask) -> None:
        for older in [each for each in self._gathering.values() if each.step < task.step]:
            self._gathering.pop(older.save_id).drop()  # a rank never sealed it
        del self._gathering[task.save_id]
        if self._when_busy == "supersede":
            for waiting in self.tasks:
                waiting.drop()
            self.superseded += len(self.tasks)
            self.tasks.clear()
        self.tasks.append(task)

    # --- what goes out --------------------------------------------------------------------------

    def next(self) -> UploadTask:
        """The first in line, from now on under way."""
        self.current = self.tasks.pop(0)
        return self.current

    def is_passed(self, task: UploadTask, now: float) -> bool:
        """Whether others need not be waited for any longer: one that was busy may have left this step out, and then
        all meet at a newer one; or one was lost."""
        if task.step <= self._forsaken or (self._when_busy != "wait" and self.tasks):
            return True
        return task.generation < self._generation and now > self._entered_at + _LEFT_BEHIND_S
