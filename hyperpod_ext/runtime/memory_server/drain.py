"""Snapshots on their way from this node's memory to a durable tier. One thread a tier; no worker takes part.

The workers may die, the whole job may: what was sealed on every node still arrives.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ext.config.checkpoint import DurableTier, FileTier, S3Tier
from hyperpod_ext.errors import HyperpodExtError, NotFoundError, StaleGenerationError
from hyperpod_ext.runtime.checkpoint.manifest import Manifest
from hyperpod_ext.runtime.checkpoint.plan import Plan
from hyperpod_ext.runtime.memory_server.pins import Hold, Pin
from hyperpod_ext.runtime.memory_server.regions import Regions, WhenBusy
from hyperpod_ext.runtime.memory_server.slots import State
from hyperpod_ext.runtime.tiers.durable import Checkpoints, Progress
from hyperpod_ext.runtime.tiers.names import folder_of
from hyperpod_ext.runtime.tiers.object_store import Cancelled, open_store
from hyperpod_ext.runtime.tiers.share_out import share_out

_POLL_S = (0.02, 1.0)
_DEADLINE_S = 600.0
_LEFT_BEHIND_S = 30.0
"""How long after a fault other nodes are waited for with what was due before it: one that was lost never brings it."""


def url_of(tier: S3Tier | FileTier, job: str) -> str:
    """Where the checkpoints of one job lie."""
    base = tier.uri if isinstance(tier, S3Tier) else tier.path
    return f"{base.rstrip('/')}/{job}"


@dataclass
class _Work:
    """One checkpoint that is due."""

    step: int
    generation: int
    save_id: str
    base_step: int
    nodes: int
    """Nodes that bring a part of it."""
    pins: dict[int, Pin] = field(default_factory=dict)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    dropped: bool = False
    brought: bool = False
    """This node's part is there: others may commit it."""

    def cancelled(self) -> bool:
        return self.dropped or any(pin.cancelled() for pin in self.pins.values())


class Drain:
    """Brings checkpoints to one durable tier.

    Args:
        tier: where, how often, how many are kept.
        regions: this node's own snapshots.
        plan_of: plan by digest.
        node, nodes: this node's number, and how many there are.
        owners: ranks of this node; a checkpoint is due here once all of them are sealed.
        run: names this run of the job among others of the same name.
    """

    def __init__(
        self,
        tier: S3Tier | FileTier,
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
        self.tier, self.url = tier, url_of(tier, job)
        self._regions, self._plan_of = regions, plan_of
        self._node, self._nodes, self._owners, self._when_busy = node, nodes, owners, when_busy
        self.checkpoints = Checkpoints(open_store(self.url), job=job, secret=secret)
        self._gathering: dict[str, _Work] = {}
        self._queue: list[_Work] = []
        self._current: _Work | None = None
        self._asked: set[int] = set()
        self._entered: dict[int, tuple[int, str]] = {}
        """Of each generation: the step at which it began, and the run."""
        self._claimed: set[int] = set()
        self._committed = self._waiting = False
        self._brought = ""
        self._skipped: set[str] = set()
        self._told: set[str] = set()
        """What others were told not to wait for."""
        self._base, self._entered_at = (0, 0, ""), 0.0
        self._stored = False
        self._changed = threading.Condition()
        self._wake = threading.Event()
        """Something happened that may end a wait for other nodes."""
        self.status: dict[str, Any] = {
            "tier": self.url,
            "durable_step": None,
            "bytes_sent": 0,
            "seconds": 0.0,
            "done": 0,
            "superseded": 0,
            "skipped": 0,
            "failed": 0,
            "last_error": None,
            "taken_over": False,
        }
        threading.Thread(target=self._work, name=f"drain {self.url}", daemon=True).start()

    # --- what is due ----------------------------------------------------------------------------

    def enter(self, generation: int, step: int, run: str, stored: bool) -> None:
        """A generation begins at `step`; checkpoints that earlier ones left incomplete never come.

        `stored`: it begins from a durable checkpoint, which need not be written once more.
        """
        with self._changed:
            self._base, self._stored, self._entered_at = (generation, step, run), stored, time.monotonic()
            self._entered[generation] = step, run
            for work in [work for work in self._gathering.values() if work.generation < generation]:
                self._drop(self._gathering.pop(work.save_id))
            # some node may never have sealed these, and none may wait for it; `step` itself is saved again
            for work in [work for work in self._queue if work.generation < generation and work.step >= step]:
                self._queue.remove(work)
                self._drop(work)
            if (now := self._current) is not None and now.generation < generation and now.step >= step:
                now.dropped = True  # its thread lets go of the memory
            self._wake.set()

    def resize(self, node: int, nodes: int, owners: int) -> None:
        """The job goes on with another number of nodes, or of ranks on this one."""
        with self._changed:
            self._node, self._nodes, self._owners = node, nodes, owners

    def ask(self, step: int) -> None:
        """Have the snapshot of `step` drained, beside those that are due by the policy."""
        with self._changed:
            self._asked.add(step)

    def sealed(self, owner: int, manifest: Manifest) -> None:
        """A snapshot was sealed; it is pinned at once if it is due."""
        step = int(manifest["step"])
        if not self._due(step):
            return
        self._take(owner, manifest)

    def take_now(self, manifests: list[Manifest]) -> None:
        """Drain these snapshots of one commit, one of each rank of this node, due or not; once is enough."""
        with self._changed:
            on_their_way = {work.save_id for work in [*self._queue, *([self._current] if self._current else [])]}
        for manifest in manifests:
            if manifest["save_id"] not in on_their_way | {self._brought}:
                self._take(int(manifest["rank"]), manifest, now=True)

    def _due(self, step: int) -> bool:
        with self._changed:
            if step in self._asked:
                return True
            if self._stored and step == self._base[1]:
                return False
        if isinstance(self.tier, DurableTier) and self.tier.every_seconds is not None:
            return False
        return step % self.tier.every_steps == 0

    def _take(self, owner: int, manifest: Manifest, *, now: bool = False) -> None:
        save_id = str(manifest["save_id"])
        with self._changed:
            if save_id in self._skipped and not now:
                return  # a checkpoint lacks no rank: what was left out for one is for all
            busy = bool(self._queue) or (self._current is not None and not self._waiting)
            if not now and self._when_busy == "skip" and busy and save_id not in self._gathering:
                self._skipped = {save_id}
                self.status["skipped"] += 1
                return
            generation, step = int(manifest["generation"]), int(manifest["step"])
            work = self._gathering.get(save_id) or _Work(step, generation, save_id, self._base[1], self._nodes)
            self._gathering[save_id] = work
            if owner not in work.pins:
                with contextlib.suppress(NotFoundError):  # overwritten already: then this checkpoint will not be
                    pin = self._regions.pin(owner, save_id, f"drain {self.url}", hold=Hold.WAITING)
                    work.pins[owner] = work.stack.enter_context(pin)
                    work.pins[owner].on_cancel = self._wake.set
            if len(work.pins) < self._owners:
                return
            for older in [w for w in self._gathering.values() if w.step < work.step]:
                self._drop(self._gathering.pop(older.save_id))  # a rank never sealed it
            del self._gathering[save_id]
            if self._when_busy == "supersede":
                for waiting in self._queue:
                    self._drop(waiting)
                    self.status["superseded"] += 1
                self._queue.clear()
            self._queue.append(work)
            self._changed.notify_all()
            self._wake.set()

    def _drop(self, work: _Work) -> None:
        work.dropped = True
        work.stack.close()

    # --- the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                work = self._current = self._queue.pop(0)
            began = time.monotonic()
            try:
                self._bring(work)
                self._brought = work.save_id
                self.status["done"] += 1
                self.status["durable_step"] = work.step
                self.status["seconds"] += time.monotonic() - began
                if self._committed:  # whoever committed it deletes what need not be kept any more
                    self.checkpoints.prune(self.tier.keep, self.tier.keep_every_steps, self.tier.keep_steps)
            except Cancelled:
                self.status["superseded"] += 1
                work.stack.close()
                self._tell_left(work)
            except Exception as error:  # whatever it was: a thread that ends would bring nothing ever after
                self.status["failed"] += 1
                self.status["taken_over"] |= isinstance(error, StaleGenerationError)
                said = str(error) if isinstance(error, HyperpodExtError) else repr(error)
                self.status["last_error"] = f"step {work.step}: {said}"
                self._tell_failed(work)
            finally:
                work.stack.close()
                with self._changed:
                    self._current = None
                    self._changed.notify_all()

    def _bring(self, work: _Work) -> None:
        """Upload this node's part, and see the checkpoint committed.

        Raises:
            Cancelled: a newer snapshot needs the memory.
            HyperpodExtError: the tier refuses it; nothing of it counts, earlier checkpoints are untouched.
        """
        checkpoints, folder = self.checkpoints.until(work.cancelled), folder_of(work.step, work.generation)
        self._committed = False
        if not all(self._regions.begin_copy(pin) for pin in work.pins.values()):
            raise Cancelled
        self._claim(work.generation, checkpoints)
        for digest in {str(pin.manifest["plan"]) for pin in work.pins.values()}:
            plan = self._plan_of(digest)
            assert plan is not None, "a snapshot is sealed only with a plan that is known"
            checkpoints.put_plan(folder, plan)
        manifests = [pin.manifest for _, pin in sorted(work.pins.items())]
        if work.save_id in self._told:
            checkpoints.forget_notes(folder, self._node)
        if work.nodes > 1:
            checkpoints.put_record(folder, self._node, manifests)
        records = self._all_records(work, folder, checkpoints)
        files, uploads = share_out(records)
        for rank in uploads[self._node]:
            self._upload(work, f"{folder}/{files[rank]}", work.pins[rank])
        work.stack.close()  # from here on the workers may have the memory
        checkpoints = self.checkpoints.until(lambda: work.dropped)
        if work.nodes > 1:
            checkpoints.put_done(folder, self._node)
            work.brought = True
        everyone = {int(manifest["rank"]): manifest for each in records.values() for manifest in each}
        self._see_committed(work, folder, everyone, files, checkpoints)
        for manifest in manifests:
            self._regions.mark(int(manifest["rank"]), work.save_id, State.DURABLE)

    def _tell_failed(self, work: _Work) -> None:
        """Let no other node wait for what does not come. Where this does not work either, they wait in vain."""
        if work.generation in self._entered and work.generation not in self._claimed:
            return  # the folder may be another run's
        if work.nodes > 1:
            with contextlib.suppress(HyperpodExtError):
                self.checkpoints.put_failed(folder_of(work.step, work.generation), self._node)
            self._told.add(work.save_id)

    def _tell_left(self, work: _Work) -> None:
        """The same, of a step that was given up here because its memory was needed: another node, which has it
        still, has no newer one to go on to before the next is due. What a new generation gave up, all have."""
        if work.nodes > 1 and not work.brought and not work.dropped:
            with contextlib.suppress(HyperpodExtError):
                self._claim(work.generation, self.checkpoints)
                self.checkpoints.put_left(folder_of(work.step, work.generation), self._node)
            self._told.add(work.save_id)

    def _claim(self, generation: int, checkpoints: Checkpoints) -> None:
        """Also for a generation that another one of this run has followed while its checkpoint waited."""
        if generation in self._entered and generation not in self._claimed:
            checkpoints.claim(generation, *self._entered[generation])
            self._claimed.add(generation)

    def _all_records(self, work: _Work, folder: str, checkpoints: Checkpoints) -> dict[int, list[Manifest]]:
        if work.nodes == 1:
            return {self._node: [pin.manifest for _, pin in sorted(work.pins.items())]}
        found: dict[int, list[Manifest]] = {}

        def complete() -> bool:
            progress = self._progress(work, folder, checkpoints)
            for node in progress.announced - found.keys():
                found[node] = checkpoints.record(folder, node)
            return len(found) >= work.nodes

        self._poll(
            lambda: work.cancelled() or self._is_passed(work), complete, f"not every node has sealed step {work.step}"
        )
        return found

    def _upload(self, work: _Work, name: str, pin: Pin) -> None:
        def count(nbytes: int) -> None:
            self.status["bytes_sent"] += nbytes

        if not self._regions.begin_reading(pin):
            raise Cancelled
        with pin.data as data:
            crc = str(pin.manifest["crc64nvme"])
            self.checkpoints.store.put(name, data, crc, cancelled=work.cancelled, on_bytes=count)

    def _see_committed(
        self,
        work: _Work,
        folder: str,
        everyone: dict[int, Manifest],
        files: dict[int, str],
        checkpoints: Checkpoints,
    ) -> None:
        """Commit when all are done. The lowest node's business; the others step in when it does not come to it."""
        patience = time.monotonic() + 2.0 * self._node

        def committed() -> bool:
            if work.nodes > 1:
                progress = self._progress(work, folder, checkpoints)
                if progress.complete:
                    return True
                if len(progress.done) < work.nodes or time.monotonic() < patience:
                    return False
            if work.generation in self._entered:  # a copy takes its time, and another run may have begun since
                checkpoints.check_not_followed(work.generation, self._entered[work.generation][1])
            self._committed = checkpoints.commit(folder, everyone, files, self._plan_of)
            return True

        # only then: the memory, which others may want, is free by now
        self._poll(
            lambda: work.dropped or self._is_passed(work),
            committed,
            f"not every node has brought its part of step {work.step}",
        )

    def _progress(self, work: _Work, folder: str, checkpoints: Checkpoints) -> Progress:
        progress = checkpoints.progress(folder)
        if others := progress.failed - {self._node}:
            raise HyperpodExtError(f"node {min(others)} could not bring its part of step {work.step}")
        if progress.left - {self._node} and not progress.complete:
            raise Cancelled
        return progress

    def _is_passed(self, work: _Work) -> bool:
        """Whether others need not be waited for any longer: one that was busy may have left this step out, and then
        all meet at a newer one; or one was lost."""
        if self._when_busy != "wait" and self._queue:
            return True
        return work.generation < self._base[0] and time.monotonic() > self._entered_at + _LEFT_BEHIND_S

    def _poll(self, given_up: Callable[[], bool], condition: Callable[[], bool], failure: str) -> None:
        wait, deadline = _POLL_S[0], time.monotonic() + _DEADLINE_S
        self._waiting = True  # for others; this node could go on
        try:
            while True:
                self._wake.clear()
                if condition():
                    return
                if given_up():
                    raise Cancelled
                if time.monotonic() > deadline:
                    raise HyperpodExtError(f"{self.url}: {failure} after {_DEADLINE_S:.0f} s")
                self._wake.wait(wait)
                wait = min(wait * 2, _POLL_S[1])
        finally:
            self._waiting = False

    # --- who waits for it -----------------------------------------------------------------------

    def wait_idle(self, timeout_s: float) -> bool:
        """Until everything due has arrived or failed; False when it still has not after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and self._current is None, timeout_s)
