"""Which snapshots of this node a durable tier is to get, in which order, and which give way. No thread, no store.

Whoever calls holds the drain's lock; what is pinned here is let go where it is dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from hyperpod_ext.config.checkpoint import DurableTier, FileTier, S3Tier
from hyperpod_ext.errors import NotFoundError
from hyperpod_ext.runtime.memory_server.slots.pins import Pin
from hyperpod_ext.runtime.memory_server.slots.regions import WhenBusy
from hyperpod_ext.runtime.snapshot.manifest import Manifest

_LEFT_BEHIND_S = 30.0
"""How long after a fault other nodes are waited for with what was due before it: one that was lost never brings it."""


@dataclass
class Work:
    """One checkpoint that is due."""

    step: int
    generation: int
    save_id: str
    nodes: int
    """Nodes that bring a part of it."""
    pins: dict[int, Pin] = field(default_factory=dict)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    dropped: bool = False
    brought: bool = False
    """This node's part is there: others may commit it."""
    left: dict[int, int] = field(default_factory=dict)
    """Bytes of each rank's image that this node has yet to bring."""
    error: str = ""
    """Why it will not arrive."""

    def cancelled(self) -> bool:
        return self.dropped or any(pin.cancelled() for pin in self.pins.values())

    def drop(self) -> None:
        self.dropped = True
        self.stack.close()


class Due:
    """What is gathered from the ranks, what waits in line, and what is under way.

    Args:
        pin: keeps the snapshot of a rank and save id in its slot for as long as the context is open; raises
            NotFoundError when it is overwritten already.
        nodes: how many there are.
        owners: ranks of this node; a checkpoint is due here once all of them are sealed.
    """

    def __init__(
        self,
        tier: S3Tier | FileTier,
        pin: Callable[[int, str], AbstractContextManager[Pin]],
        *,
        nodes: int,
        owners: int,
        when_busy: WhenBusy,
    ) -> None:
        self._tier, self._pin, self._when_busy = tier, pin, when_busy
        self._nodes, self._owners = nodes, owners
        self._gathering: dict[str, Work] = {}
        self.queue: list[Work] = []
        self.current: Work | None = None
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

    # --- the job --------------------------------------------------------------------------------

    def enter(self, generation: int, step: int, stored: bool, now: float) -> None:
        """A generation begins at `step`; checkpoints that earlier ones left incomplete never come."""
        self._generation, self._step, self._stored, self._entered_at = generation, step, stored, now
        self.newest, self._forsaken = step, -1
        for work in [work for work in self._gathering.values() if work.generation < generation]:
            self._gathering.pop(work.save_id).drop()
        # some node may never have sealed these, and none may wait for it; `step` itself is saved again
        for work in [work for work in self.queue if work.generation < generation and work.step >= step]:
            self.queue.remove(work)
            work.drop()
        if (under_way := self.current) is not None and under_way.generation < generation and under_way.step >= step:
            under_way.dropped = True  # its thread lets go of the memory

    def forsake(self) -> None:
        """The memory of another node is lost. Its ranks may have been a step further than those here: unless its part
        of that, or of an earlier one, is there already, it may never come."""
        self._forsaken = self.newest + 1

    def resize(self, nodes: int, owners: int) -> None:
        self._nodes, self._owners = nodes, owners

    def ask(self, step: int) -> None:
        """Have the snapshot of `step` drained, beside those that are due by the policy."""
        self._asked.add(step)

    # --- what comes in --------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        if step in self._asked:
            return True
        if self._stored and step == self._step:
            return False
        if isinstance(self._tier, DurableTier) and self._tier.every_seconds is not None:
            return False  # the steps to take are asked for, the same on all nodes
        return step % self._tier.every_steps == 0

    def has_arrived(self, step: int, save_id: str) -> bool:
        """Or was there before, as what the job went on from."""
        return save_id == self.brought or (self._stored and step == self._step)

    def on_its_way(self, save_id: str) -> Work | None:
        under_way = [self.current] if self.current else []
        return next((work for work in [*under_way, *self.queue] if work.save_id == save_id), None)

    def take(self, owner: int, manifest: Manifest, wake: Callable[[], None], *, now: bool = False) -> bool:
        """A snapshot of one rank was sealed. True: with it a checkpoint of this node is whole, and in line.

        `wake` is called when its memory is needed. `now`: take it whatever else is on its way.
        """
        save_id = str(manifest["save_id"])
        if save_id in self._skipped and not now:
            return False  # a checkpoint lacks no rank: what was left out for one is for all
        busy = bool(self.queue) or (self.current is not None and not self.waiting)
        if not now and self._when_busy == "skip" and busy and save_id not in self._gathering:
            self._skipped = {save_id}
            self.skipped += 1
            return False
        generation, step = int(manifest["generation"]), int(manifest["step"])
        work = self._gathering.get(save_id) or Work(step, generation, save_id, self._nodes)
        self._gathering[save_id] = work
        if owner not in work.pins:
            with contextlib.suppress(NotFoundError):  # overwritten already: then this checkpoint will not be
                work.pins[owner] = work.stack.enter_context(self._pin(owner, save_id))
                work.pins[owner].on_cancel = wake
                work.left[owner] = int(manifest["nbytes"])
        if len(work.pins) < self._owners:
            return False
        self._line_up(work)
        return True

    def _line_up(self, work: Work) -> None:
        for older in [each for each in self._gathering.values() if each.step < work.step]:
            self._gathering.pop(older.save_id).drop()  # a rank never sealed it
        del self._gathering[work.save_id]
        if self._when_busy == "supersede":
            for waiting in self.queue:
                waiting.drop()
            self.superseded += len(self.queue)
            self.queue.clear()
        self.queue.append(work)

    # --- what goes out --------------------------------------------------------------------------

    def next(self) -> Work:
        """The first in line, from now on under way."""
        self.current = self.queue.pop(0)
        return self.current

    def is_passed(self, work: Work, now: float) -> bool:
        """Whether others need not be waited for any longer: one that was busy may have left this step out, and then
        all meet at a newer one; or one was lost."""
        if work.step <= self._forsaken or (self._when_busy != "wait" and self.queue):
            return True
        return work.generation < self._generation and now > self._entered_at + _LEFT_BEHIND_S
