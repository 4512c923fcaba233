"""Reads snapshots from the durable tiers for a restore, and caches them in this node's memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Sequence
from typing import Any

from hyperpod_ext.errors import CorruptSnapshotError, HyperpodExtError, NotFoundError
from hyperpod_ext.runtime.memory_server.plans import Plans
from hyperpod_ext.runtime.memory_server.protocol.requests import DurableCheckpoints
from hyperpod_ext.runtime.memory_server.slots.budget import Budget
from hyperpod_ext.runtime.memory_server.slots.region import Region
from hyperpod_ext.runtime.memory_server.uploader import Uploader
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.manifest import Manifest, save_id_of
from hyperpod_ext.runtime.storage.checkpoints import is_of_node
from hyperpod_ext.runtime.storage.mac import is_bound
from hyperpod_ext.runtime.storage.names import Found

_MOST_PROBLEMS = 20


class RestoreCache:
    """One node's cache of snapshots that were read from the durable tiers of its uploaders."""

    def __init__(self, uploaders: Sequence[Uploader], budget: Budget, plans: Plans) -> None:
        self._uploaders, self._budget, self._plans = uploaders, budget, plans
        self._fetched: dict[tuple[str, str, str], Region] = {}
        self._fetching = threading.Lock()
        self._read: tuple[tuple[str, str], Manifest] | None = None
        """URL and folder, and manifest, of the checkpoint whose manifest was read last. The manifest is kept because
        the ranks of this node request several snapshots from one checkpoint."""
        self._plan_of: dict[str, Plan] = {}
        """Layouts of the snapshots in the checkpoint of `_read`, by digest."""

    def offers(self, exclude: Collection[tuple[str, str]] = (), newest: int = 4) -> DurableCheckpoints:
        """Return the newest checkpoints with a valid manifest from each durable tier that is not on a node's own disk,
        at most `newest` per tier.

        `exclude` contains the checkpoints that ranks have refused, as pairs of URL and save id.
        """
        offers: list[dict[str, Any]] = []
        problems: list[str] = []
        unreachable: list[str] = []
        generation = 0
        for uploader in (each for each in self._uploaders if not each.tier.on_node):
            try:
                generation = max(generation, uploader.checkpoints.newest_generation())
                found = uploader.checkpoints.found()
            except HyperpodExtError as error:
                problems.append(in_line(error))
                unreachable.append(problems[-1])
                continue
            for one in found:
                if (uploader.url, save_id_of(one.generation, one.step)) in exclude:
                    continue
                try:
                    manifest = uploader.checkpoints.read(one)
                except HyperpodExtError as error:
                    problems.append(in_line(error))
                    if not isinstance(error, CorruptSnapshotError | NotFoundError):
                        if not any(offer["url"] == uploader.url for offer in offers):
                            unreachable.append(problems[-1])
                        break
                    continue
                if is_of_node(manifest):
                    continue  # a checkpoint that was copied from a node's disk by hand has the ranks of one node only
                keys = ("step", "generation", "save_id", "world_size")
                summary = {key: manifest[key] for key in keys}
                offers.append({**summary, "tier": uploader.tier.kind, "url": uploader.url, "folder": one.folder})
                if sum(offer["url"] == uploader.url for offer in offers) >= newest:
                    break
        return DurableCheckpoints(
            checkpoints=tuple(offers),
            generation=generation,
            problems=_some(problems),
            unreachable=_some(unreachable),
        )

    def fetch(self, url: str, folder: str, rank: int) -> tuple[Manifest, Plan, int, int, bool]:
        """Read a rank's snapshot from a durable checkpoint into memory. If several ranks of this node request the same
        snapshot, it is read only once.

        Returns the manifest, the layout, the offset of the snapshot's bytes, a read-only file descriptor of the memory,
        and whether a MAC proves that the job wrote the bytes. Checkpoints of earlier versions of this package may have
        no MACs. The snapshot's CRC is not verified.

        Raises:
            NotFoundError, UnreachableError: the snapshot cannot be read.
            CorruptSnapshotError: the snapshot is damaged or belongs to another job.
        """
        manifest, plan, bound, region = self._region(url, folder, rank)
        return manifest, plan, 0, os.open(f"/proc/self/fd/{region.fd}", os.O_RDONLY | os.O_CLOEXEC), bound

    def image(self, url: str, folder: str, rank: int) -> tuple[Manifest, Plan, memoryview]:
        """Return a snapshot's manifest, layout and bytes, to send them to another node. The memoryview stays valid
        after `forget`."""
        manifest, plan, _, region = self._region(url, folder, rank)
        return manifest, plan, region.view(0, int(manifest["nbytes"]))

    def _region(self, url: str, folder: str, rank: int) -> tuple[Manifest, Plan, bool, Region]:
        uploader = self._uploader(url)
        manifest, plan, bound = self.head(url, folder, rank)
        checkpoint = self._checkpoint(uploader, folder)
        name = checkpoint["files"][str(rank)]
        self.forget(but=(url, folder))  # free the checkpoints that were fetched before, which ranks have refused
        with self._fetching:
            region = self._fetched.get((url, folder, name))
            if region is None:
                nbytes = int(manifest["nbytes"])
                region = self._budget.make(f"hpx-fetched-{rank}", nbytes, 1, f"restoring {folder} from {url}")
                try:
                    with region.view(0, nbytes) as view:
                        uploader.checkpoints.read_image(folder, checkpoint, str(rank), view)
                except BaseException:
                    region.close()
                    self._budget.give_back(region.nbytes)
                    raise
                self._fetched[url, folder, name] = region
        return manifest, plan, bound, region

    def head(self, url: str, folder: str, rank: int) -> tuple[Manifest, Plan, bool]:
        """Return the manifest and layout of a rank's snapshot in a durable tier, and whether its bytes have a MAC. Does
        not read the snapshot's bytes.

        Raises: the same errors as `fetch`.
        """
        uploader = self._uploader(url)
        checkpoint = self._checkpoint(uploader, folder)
        manifest = checkpoint["ranks"][str(rank)]
        digest = str(manifest["plan"])
        if (plan := self._plans.get(digest) or self._plan_of.get(digest)) is None:
            plan = self._plan_of[digest] = uploader.checkpoints.read_plan(folder, digest)
        return manifest, plan, is_bound(checkpoint)

    def _uploader(self, url: str) -> Uploader:
        uploader = next((uploader for uploader in self._uploaders if uploader.url == url), None)
        if uploader is None:
            raise NotFoundError(f"{url} is no tier of this job")
        return uploader

    def _checkpoint(self, uploader: Uploader, folder: str) -> Manifest:
        """Return the verified manifest of a checkpoint in a durable tier."""
        known = self._read
        if known is not None and known[0] == (uploader.url, folder):
            return known[1]
        step, _, generation = folder.removeprefix("step-").partition("-g")
        checkpoint = uploader.checkpoints.read(Found(int(step), int(generation)))
        self._read, self._plan_of = ((uploader.url, folder), checkpoint), {}
        return checkpoint

    def forget(self, but: tuple[str, str] = ("", "")) -> bool:
        """Free all fetched snapshots except those of the checkpoint `but` (URL, folder). Returns whether a snapshot was
        freed.

        Processes that are reading a freed snapshot have their own mapping of the memory, which stays valid.
        """
        with self._fetching:
            gone = [key for key in self._fetched if key[:2] != but]
            for key in gone:
                region = self._fetched.pop(key)
                region.close()
                self._budget.give_back(region.nbytes)
        if self._read is not None and self._read[0] != but:
            self._read, self._plan_of = None, {}
        return bool(gone)


def _some(problems: Sequence[str]) -> tuple[str, ...]:
    """Return the first 20 problems, and one entry with the number of further problems. A damaged tier may cause
    thousands of problems."""
    left = len(problems) - _MOST_PROBLEMS
    return (*problems[:_MOST_PROBLEMS], *([f"{left} more"] if left > 0 else []))


def in_line(error: HyperpodExtError) -> str:
    """Return an error's message and hint on one line, without the last full stop."""
    sentences = [" ".join(text.split()).removesuffix(".") for text in (error.message, error.hint) if text]
    return ". ".join(sentences)
