"""What the durable tiers have to restore from, and what of it was brought into this node's memory."""

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
    """Of one node; the uploader of each durable tier knows where that is."""

    def __init__(self, uploaders: Sequence[Uploader], budget: Budget, plans: Plans) -> None:
        self._uploaders, self._budget, self._plans = uploaders, budget, plans
        self._fetched: dict[tuple[str, str, str], Region] = {}
        self._fetching = threading.Lock()
        self._read: tuple[tuple[str, str], Manifest] | None = None
        """The checkpoint that was read last, and its manifest: each rank asks for the images of several."""
        self._plan_of: dict[str, Plan] = {}
        """Layouts of its images, by their digests."""

    def offers(self, exclude: Collection[tuple[str, str]] = (), newest: int = 4) -> DurableCheckpoints:
        """The newest checkpoints of each durable tier, verified as far as their manifests go.

        `exclude`: URL and save id of those that were refused and need not be named again.
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
                    continue  # somebody has copied it here
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
        """A rank's snapshot of a durable checkpoint, brought into memory once for all ranks of this node.

        The last that is returned is whether its bytes are known to be the job's; False where an earlier version has
        written it. Its CRC is not verified yet.

        Raises:
            NotFoundError, CorruptSnapshotError, UnreachableError: it cannot be had, or the job has not written it.
        """
        manifest, plan, bound, region = self._region(url, folder, rank)
        return manifest, plan, 0, os.open(f"/proc/self/fd/{region.fd}", os.O_RDONLY | os.O_CLOEXEC), bound

    def image(self, url: str, folder: str, rank: int) -> tuple[Manifest, Plan, memoryview]:
        """The same for another node: a view of its bytes, which lives on when they are forgotten."""
        manifest, plan, _, region = self._region(url, folder, rank)
        return manifest, plan, region.view(0, int(manifest["nbytes"]))

    def _region(self, url: str, folder: str, rank: int) -> tuple[Manifest, Plan, bool, Region]:
        uploader = self._uploader(url)
        manifest, plan, bound = self.head(url, folder, rank)
        checkpoint = self._checkpoint(uploader, folder)
        name = checkpoint["files"][str(rank)]
        self.forget(but=(url, folder))  # another was refused
        with self._fetching:
            region = self._fetched.get((url, folder, name))
            if region is None:
                nbytes = int(manifest["nbytes"])
                region = self._budget.make(f"hpx-fetched-{rank}", nbytes, 1, f"restoring {folder} from {url}")
                try:
                    with region.view(0, nbytes) as view:
                        uploader.checkpoints.store.read_into(f"{folder}/{name}", view)
                        uploader.checkpoints.check_image(folder, checkpoint, str(rank), view)
                except BaseException:
                    region.close()
                    self._budget.give_back(region.nbytes)
                    raise
                self._fetched[url, folder, name] = region
        return manifest, plan, bound, region

    def head(self, url: str, folder: str, rank: int) -> tuple[Manifest, Plan, bool]:
        """What is known of a rank's snapshot of a durable checkpoint before its bytes are read: manifest, layout, and
        whether its bytes will be known to be the job's.

        Raises:
            NotFoundError, CorruptSnapshotError, UnreachableError: it cannot be had, or the job has not written it.
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
        """The manifest of a checkpoint, verified."""
        known = self._read
        if known is not None and known[0] == (uploader.url, folder):
            return known[1]
        step, _, generation = folder.removeprefix("step-").partition("-g")
        checkpoint = uploader.checkpoints.read(Found(int(step), int(generation)))
        self._read, self._plan_of = ((uploader.url, folder), checkpoint), {}
        return checkpoint

    def forget(self, but: tuple[str, str] = ("", "")) -> bool:
        """Training goes on from what was fetched, so its memory is needed no more, but for that of `but`: URL and
        folder. Whoever reads it this moment has it mapped. Returns whether there was any."""
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
    """The first of them, as others may make any number by what they write to a tier."""
    left = len(problems) - _MOST_PROBLEMS
    return (*problems[:_MOST_PROBLEMS], *([f"{left} more"] if left > 0 else []))


def in_line(error: HyperpodExtError) -> str:
    """An error's words on one line, without the full stop."""
    sentences = [" ".join(text.split()).removesuffix(".") for text in (error.message, error.hint) if text]
    return ". ".join(sentences)
