"""One checkpoint's way to a durable tier: this node's part of it, what the nodes tell each other, and the commit.

Everything here runs in the one thread of a drain. It waits for other nodes, for S3, and never for a worker.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping

from hyperpod_ext.errors import HyperpodExtError, NotFoundError
from hyperpod_ext.runtime.memory_server.slots.regions import Regions
from hyperpod_ext.runtime.memory_server.slots.slots import State
from hyperpod_ext.runtime.memory_server.upload_queue import Due, Work
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.manifest import Manifest
from hyperpod_ext.runtime.storage.checkpoints import Checkpoints, Progress
from hyperpod_ext.runtime.storage.mac import Mac
from hyperpod_ext.runtime.storage.names import folder_of
from hyperpod_ext.runtime.storage.object_store import Cancelled
from hyperpod_ext.runtime.storage.upload_split import share_out

_POLL_S = (0.02, 1.0)
_DEADLINE_S = 600.0


class Delivery:
    """Brings to one tier what `due` hands out.

    Args:
        regions: this node's own snapshots.
        plan_of: plan by digest.
        node: this node's number.
        on_bytes: hears of bytes handed over, and of as many negative ones when they must be sent again.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        regions: Regions,
        plan_of: Callable[[str], Plan | None],
        due: Due,
        *,
        node: int,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._checkpoints, self._regions, self._plan_of, self._due = checkpoints, regions, plan_of, due
        self.node, self._on_bytes = node, on_bytes
        self.entered: dict[int, tuple[int, str]] = {}
        """Of each generation: the step at which it began, and the run."""
        self._claimed: set[int] = set()
        self._told: set[str] = set()
        """What others were told not to wait for."""
        self.wake = threading.Event()
        """Something happened that may end a wait for other nodes."""

    def bring(self, work: Work) -> bool:
        """Upload this node's part, and see the checkpoint committed; whether it was this node that committed it.

        Raises:
            Cancelled: a newer snapshot needs the memory.
            HyperpodExtError: the tier refuses it; nothing of it counts, earlier checkpoints are untouched.
        """
        checkpoints, folder = self._checkpoints.until(work.cancelled), folder_of(work.step, work.generation)
        if not all(self._regions.begin_copy(pin) for pin in work.pins.values()):
            raise Cancelled
        self._claim(work.generation, checkpoints)
        for digest in {str(pin.manifest["plan"]) for pin in work.pins.values()}:
            plan = self._plan_of(digest)
            assert plan is not None, "a snapshot is sealed only with a plan that is known"
            checkpoints.put_plan(folder, plan)
        manifests = [pin.manifest for _, pin in sorted(work.pins.items())]
        if work.save_id in self._told:
            checkpoints.forget_notes(folder, self.node)
        if work.nodes > 1:
            checkpoints.put_record(folder, self.node, manifests)
        records = self._all_records(work, folder, checkpoints)
        files, uploads = share_out(records)
        # of images that are equal one is brought, by one node
        work.left = {rank: int(work.pins[rank].manifest["nbytes"]) for rank in uploads[self.node]}
        macs = {}
        for rank in uploads[self.node]:
            macs[files[rank]] = self._upload(work, f"{folder}/{files[rank]}", rank)
            del work.left[rank]
        work.stack.close()  # from here on the workers may have the memory
        checkpoints = self._checkpoints.until(lambda: work.dropped)
        if work.nodes > 1:
            checkpoints.put_done(folder, self.node, macs)
            work.brought = True
        everyone = {int(manifest["rank"]): manifest for each in records.values() for manifest in each}
        committed = self._see_committed(work, folder, everyone, files, macs, checkpoints)
        for manifest in manifests:
            self._regions.mark(int(manifest["rank"]), work.save_id, State.DURABLE)
        return committed

    # --- what others are told -------------------------------------------------------------------

    def tell_failed(self, work: Work) -> None:
        """Let no other node wait for what does not come. Where this does not work either, they wait in vain."""
        if work.generation in self.entered and work.generation not in self._claimed:
            return  # the folder may be another run's
        if work.nodes > 1:
            with contextlib.suppress(HyperpodExtError):
                self._checkpoints.put_failed(folder_of(work.step, work.generation), self.node)
            self._told.add(work.save_id)

    def tell_left(self, work: Work) -> None:
        """The same, of a step that was given up here because its memory was needed: another node, which has it
        still, has no newer one to go on to before the next is due. What a new generation gave up, all have."""
        if work.nodes > 1 and not work.brought and not work.dropped:
            with contextlib.suppress(HyperpodExtError):
                self._claim(work.generation, self._checkpoints)
                self._checkpoints.put_left(folder_of(work.step, work.generation), self.node)
            self._told.add(work.save_id)

    def _claim(self, generation: int, checkpoints: Checkpoints) -> None:
        """Also for a generation that another one of this run has followed while its checkpoint waited."""
        if generation in self.entered and generation not in self._claimed:
            checkpoints.claim(generation, *self.entered[generation])
            self._claimed.add(generation)

    # --- one step after the other ---------------------------------------------------------------

    def _all_records(self, work: Work, folder: str, checkpoints: Checkpoints) -> dict[int, list[Manifest]]:
        if work.nodes == 1:
            return {self.node: [pin.manifest for _, pin in sorted(work.pins.items())]}
        found: dict[int, list[Manifest]] = {}

        def complete() -> bool:
            progress = self._progress(work, folder, checkpoints)
            for node in progress.announced - found.keys():
                found[node] = checkpoints.record(folder, node)
            return len(found) >= work.nodes

        self._poll(
            lambda: work.cancelled() or self._due.is_passed(work, time.monotonic()),
            complete,
            f"not every node has sealed step {work.step}",
        )
        return found

    def _upload(self, work: Work, name: str, rank: int) -> Mac:
        """Bring one image; its MAC is made here, where nobody waits for it but the checkpoint."""
        pin = work.pins[rank]

        def handed_over(nbytes: int) -> None:
            work.left[rank] -= nbytes
            self._on_bytes(nbytes)

        if not self._regions.begin_reading(pin):
            raise Cancelled
        with pin.data as data:
            crc = str(pin.manifest["crc64nvme"])
            mac = self._checkpoints.mac(data, work.cancelled)
            self._checkpoints.store.put(name, data, crc, cancelled=work.cancelled, on_bytes=handed_over)
        return mac

    def _see_committed(
        self,
        work: Work,
        folder: str,
        everyone: dict[int, Manifest],
        files: dict[int, str],
        macs: Mapping[str, Mac],
        checkpoints: Checkpoints,
    ) -> bool:
        """Commit when all are done. The lowest node's business; the others step in when it does not come to it."""
        patience = time.monotonic() + 2.0 * self.node
        by_us = False

        def committed() -> bool:
            nonlocal by_us
            known = dict(macs)
            if work.nodes > 1:
                progress = self._progress(work, folder, checkpoints)
                if progress.complete:
                    return True
                if len(progress.done) < work.nodes or time.monotonic() < patience:
                    return False
                try:
                    for node in progress.done - {self.node}:
                        known |= checkpoints.macs(folder, node)
                except NotFoundError:  # another has committed since
                    return False
            if work.generation in self.entered:  # a copy takes its time, and another run may have begun since
                checkpoints.check_not_followed(work.generation, self.entered[work.generation][1])
            by_us = checkpoints.commit(folder, everyone, files, known, self._plan_of)
            return True

        # only then: the memory, which others may want, is free by now
        self._poll(
            lambda: work.dropped or self._due.is_passed(work, time.monotonic()),
            committed,
            f"not every node has brought its part of step {work.step}",
        )
        return by_us

    def _progress(self, work: Work, folder: str, checkpoints: Checkpoints) -> Progress:
        progress = checkpoints.progress(folder)
        if others := progress.failed - {self.node}:
            raise HyperpodExtError(f"node {min(others)} could not bring its part of step {work.step}")
        if progress.left - {self.node} and not progress.complete:
            raise Cancelled
        return progress

    def _poll(self, given_up: Callable[[], bool], condition: Callable[[], bool], failure: str) -> None:
        wait, deadline = _POLL_S[0], time.monotonic() + _DEADLINE_S
        self._due.waiting = True
        try:
            while True:
                self.wake.clear()
                if condition():
                    return
                if given_up():
                    raise Cancelled
                if time.monotonic() > deadline:
                    raise HyperpodExtError(f"{self._checkpoints.store.url}: {failure} after {_DEADLINE_S:.0f} s")
                self.wake.wait(wait)
                wait = min(wait * 2, _POLL_S[1])
        finally:
            self._due.waiting = False
