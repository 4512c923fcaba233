"""Finds the snapshots of this node's ranks on the node's own disks, and reads them for a restore on this or another
node.

Every joining rank requests the list of the snapshots on the node's disks. The list of snapshots comes from an index in
memory, so that a hung disk does not block a joining rank.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hyperpod_ext.errors import HyperpodExtError, NotFoundError
from hyperpod_ext.runtime.memory_server.plans import Plans
from hyperpod_ext.runtime.memory_server.restore_cache import RestoreCache, in_line
from hyperpod_ext.runtime.memory_server.slots.regions import summary_of
from hyperpod_ext.runtime.memory_server.uploader import Uploader
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.manifest import Manifest, without_run

_FIRST_LOOK_S = 10.0
"""Time limit, in seconds, for the first read of a disk. A disk whose first read exceeds this limit counts as unreadable
until the read ends."""
_MOST_PROBLEMS = 5


@dataclass(frozen=True, slots=True)
class _Look:
    """Result of one scan of a disk: the snapshots on the disk, and the problems of the disk."""

    snapshots: tuple[dict[str, Any], ...] = ()
    generation: int = 0
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenSnapshot:
    """A snapshot that was read from a disk, with verified manifest and bytes."""

    manifest: Manifest
    plan: Plan
    data: memoryview


class NodeDisk:
    """The durable tiers on this node's own disks."""

    def __init__(
        self, uploaders: Sequence[Uploader], cache: RestoreCache, plans: Plans, first_look_s: float = _FIRST_LOOK_S
    ) -> None:
        self._cache, self._plans, self._first_look_s = cache, plans, first_look_s
        self.run = ""
        """Name of this run of the job; empty until the node has joined the run."""
        self._looks: dict[str, _Look] = {}
        self._looked = threading.Condition()
        self._uploaders = [uploader for uploader in uploaders if uploader.tier.on_node]
        for uploader in self._uploaders:
            uploader.on_change = self._look_at
            threading.Thread(target=self._look_at, args=(uploader, True), name="disk", daemon=True).start()

    def state(self) -> dict[str, Any]:
        """Return the snapshots, newest generation and problems of all disks, in the form of `DiskState`."""
        with self._looked:
            self._looked.wait_for(lambda: len(self._looks) == len(self._uploaders), self._first_look_s)
            # a slow disk is reported as a problem until it is read, so that only the first call waits for it
            looks = [self._looks.setdefault(each.url, self._silent(each)) for each in self._uploaders]
        return {
            "snapshots": [one for look in looks for one in look.snapshots],
            "generation": max((look.generation for look in looks), default=0),
            "problems": [problem for look in looks for problem in look.problems],
        }

    def has(self, owner: int, save_id: str) -> bool:
        """Return whether a rank's snapshot is on a disk of this node. The save id of a snapshot from another run
        contains the name of that run."""
        return self._find(owner, save_id) is not None

    def may_have(self, uploader: Uploader, step: int) -> bool:
        """Return whether the uploader's tier may contain this node's snapshots of `step`. A tier on this node's own
        disk lacks `step` if the job restored `step` from another node's disk."""
        there = (one["step"] for one in self._looks.get(uploader.url, _Look()).snapshots)
        return not uploader.tier.on_node or step in there

    def place(self, owner: int, save_id: str) -> tuple[str, str, int]:
        """Return the URL, folder and rank of a snapshot, with which `RestoreCache.fetch` can read it.

        Raises:
            NotFoundError: the snapshot is on no disk of this node.
        """
        if (found := self._find(owner, save_id)) is None:
            raise NotFoundError(f"{save_id} of rank {owner} is not on this node")
        return found["url"], found["folder"], owner

    @contextmanager
    def pin(self, owner: int, save_id: str, who: str, *, restoring: bool = False) -> Iterator[OpenSnapshot]:
        """Read a snapshot for another node. The parameters are the same as those of `Regions.pin`."""
        manifest, plan, data = self._cache.image(*self.place(owner, save_id))
        self._plans.add(plan.to_json(), plan.digest)
        with data:
            yield OpenSnapshot(manifest, plan, data)

    def _silent(self, uploader: Uploader) -> _Look:
        return _Look(problems=(f"{uploader.url} has not answered in {self._first_look_s:g} s",))

    def _find(self, owner: int, save_id: str) -> dict[str, Any] | None:
        own, run = without_run(save_id)
        every = (one for look in self._looks.values() for one in look.snapshots)
        wanted = owner, own, run or self.run
        return next((one for one in every if (one["rank"], one["save_id"], one["run"]) == wanted), None)

    def _look_at(self, uploader: Uploader, check: bool = False) -> None:
        """Read all manifests on a disk, and update the index. A checkpoint with an invalid manifest is reported as a
        problem, and cannot be restored.

        `check`: whether to check also that the disk is writable. Checkpoints on a read-only disk can still be restored.
        """
        generation, snapshots, problems = 0, list[dict[str, Any]](), list[str]()
        try:
            if check:
                uploader.checkpoints.store.check()
        except HyperpodExtError as error:
            problems.append(f"checkpoints cannot be saved on this disk: {in_line(error)}")
        try:
            generation = uploader.checkpoints.newest_generation()
            for found in uploader.checkpoints.found():
                try:
                    manifest = uploader.checkpoints.read(found)
                    fence = uploader.checkpoints.claim(found)
                except HyperpodExtError as error:
                    problems.append(in_line(error))
                    continue
                known = {"tier": uploader.tier.kind, "url": uploader.url, "folder": found.folder}
                known |= {"run": fence["run"], "began": fence["step"]}
                snapshots += [{**summary_of(one), **known} for one in manifest["ranks"].values()]
        except HyperpodExtError as error:
            problems.append(in_line(error))
        # an unexpected error must also lead to a result for the disk, because `state` waits for this result
        except Exception as error:
            problems.append(f"{uploader.url}: {error!r}")
        with self._looked:
            self._looks[uploader.url] = _Look(tuple(snapshots), generation, tuple(problems[:_MOST_PROBLEMS]))
            self._looked.notify_all()
