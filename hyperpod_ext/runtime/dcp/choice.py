"""Choose the step that all ranks load, and each rank's source of its state: memory, another node, or a durable tier.

If a source fails on one rank, no rank uses that source again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from hyperpod_ext.errors import HyperpodExtError, NoCheckpointError
from hyperpod_ext.runtime.dcp.state import Contents, contents_of
from hyperpod_ext.runtime.membership.node_map import Nodes
from hyperpod_ext.runtime.snapshot.layout_plan import read_plan
from hyperpod_ext.runtime.snapshot.manifest import check_manifest
from hyperpod_ext.runtime.snapshot.select import Decision, OfferKey, Source, place_of
from hyperpod_ext.runtime.snapshot.snapshot import Snapshot


@dataclass(frozen=True)
class Refused:
    """A source that a rank could not read, and the reason."""

    place: OfferKey
    """Identity of the source: tier, rank, node, save ID and URL."""
    why: str


class Loader(Protocol):
    """This rank's access to the tiers and to the other ranks."""

    rank: int
    nodes: Nodes
    job: str
    secret: bytes

    def gather_found(
        self, found: Mapping[int, Any], failures: Sequence[Refused]
    ) -> tuple[dict[int, Any], list[Refused]]:
        """Return the opened snapshots and the failures of all ranks. Collective.

        Args:
            found: manifests and plans of the snapshots that this rank has opened, by the snapshot's rank.
            failures: the sources that this rank could not read.
        """

    def open_source(self, source: Source) -> Snapshot:
        """Return the snapshot in `source`, whose manifest is verified, but whose data is not. This call is not
        collective."""


class Choice:
    """A step chosen to be loaded, with the snapshots that this rank has opened."""

    def __init__(self, tiers: Loader, decision: Decision) -> None:
        self._tiers, self.decision = tiers, decision
        self._snapshots: dict[int, Snapshot] = {}
        self._shards: dict[tuple[int, int], torch.Tensor] = {}
        """Verified shards, by the rank that saved them and the index of the item in that rank's snapshot."""
        self.contents: Contents

    @property
    def step(self) -> int:
        return self.decision.step

    def open(self) -> list[Refused]:
        """Open the snapshots of the step, and return the sources that a rank could not open. Collective."""
        mine: dict[int, Any] = {}
        failures: list[Refused] = []
        for rank in self._assigned[self._tiers.rank]:
            try:
                snapshot = self._snapshot(rank)
                assert snapshot.manifest is not None
                if self._source(rank).kind == "durable":
                    _ = snapshot.image  # this access checks the MAC of the file, before the step is chosen
                mine[rank] = {"manifest": snapshot.manifest, "plan": snapshot.plan.to_json()}
            except Exception as error:  # catch any error, because the other ranks wait for this rank's answer
                failures.append(self._refusal(rank, error))
        found, failures = self._tiers.gather_found(mine, failures)
        if not failures:
            self.contents = self._read(found)
        return failures

    def _read(self, found: Mapping[int, Any]) -> Contents:
        parts = {}
        for rank, one in found.items():
            manifest = one["manifest"]
            check_manifest(manifest, self._tiers.secret, job=self._tiers.job)
            parts[rank] = (read_plan(one["plan"], manifest["plan"]), manifest["values"])
        return contents_of(parts)

    def verify(self, places: Iterable[tuple[str, tuple[int, ...]]]) -> list[Refused]:
        """Read and verify the shards that this rank needs, and return the failures of all ranks. Collective.

        Args:
            places: the shards, each as a tensor's name and the shard's offsets in the tensor.
        """
        failures: list[Refused] = []
        wanted: dict[int, set[int]] = {}
        for place in places:
            rank, item = self._holder(place)
            wanted.setdefault(rank, set()).add(item)
        for rank, numbers in sorted(wanted.items()):
            try:
                snapshot, chosen = self._snapshot(rank), sorted(numbers)
                shards = snapshot.read([snapshot.plan.items[number] for number in chosen])
                self._shards |= {(rank, number): shard for number, shard in zip(chosen, shards, strict=True)}
            except Exception as error:  # catch any error, because the other ranks wait for this rank's answer
                failures.append(self._refusal(rank, error))
        return self._tiers.gather_found({}, failures)[1]

    def shard(self, place: tuple[str, tuple[int, ...]]) -> torch.Tensor:
        """Return a shard that `verify` has read. `place`: the tensor's name and the shard's offsets in the tensor."""
        return self._shards[self._holder(place)]

    def value(self, name: str) -> Any:
        return self.contents.value(name, self.decision.source(self._tiers.rank).rank)

    # --- sources --------------------------------------------------------------------------------

    @cached_property
    def _assigned(self) -> dict[int, list[int]]:
        """For each current rank, the saving ranks whose snapshots it opens on behalf of all current ranks.

        Each rank that saved the step is assigned to exactly one current rank.
        """
        assigned: dict[int, list[int]] = {rank: [] for rank in self.decision.sources}
        having: dict[int, list[int]] = {}
        for rank, sources in sorted(self.decision.sources.items()):
            for source in sources:
                having.setdefault(source.rank, []).append(rank)
        for owner, ranks in having.items():
            assigned[owner if owner in ranks else ranks[owner % len(ranks)]].append(owner)
        return assigned

    def _holder(self, place: tuple[str, tuple[int, ...]]) -> tuple[int, int]:
        """Return the saving rank and the item index of a snapshot with this shard; this rank's own source is
        preferred."""
        holders = self.contents.holders[place]
        own = self.decision.source(self._tiers.rank).rank
        return next((held for held in holders if held[0] == own), holders[0])

    def _snapshot(self, owner: int) -> Snapshot:
        if owner not in self._snapshots:
            self._snapshots[owner] = self._tiers.open_source(self._source(owner))
        return self._snapshots[owner]

    def _source(self, owner: int) -> Source:
        """Return the source from which this rank reads the snapshot that rank `owner` saved.

        A source of another rank is returned only if this rank's own sources do not have the snapshot.
        """
        mine, node = self._tiers.rank, self._tiers.nodes.node_of
        ranks = sorted(self.decision.sources, key=lambda rank: (rank != mine, node[rank] != node[mine], rank))
        for rank in ranks:
            for source in self.decision.sources[rank]:
                if source.rank == owner:
                    return self._seen_from(source, node[rank], node[mine])
        raise NoCheckpointError(f"no source has the state of rank {owner} at step {self.step}")

    @staticmethod
    def _seen_from(source: Source, there: int, here: int) -> Source:
        if source.kind == "memory" and there != here:
            return replace(source, kind="peer", node=there)
        if source.kind == "peer" and source.node == here:
            return replace(source, kind="memory")
        if source.kind == "durable" and source.node not in (-1, here):
            return replace(source, url="", folder="")
        return source

    def _refusal(self, owner: int, error: Exception) -> Refused:
        source = self._source(owner)
        nodes = self._tiers.nodes.node_of
        here = replace(source, node=nodes[self._tiers.rank]) if source.kind == "memory" else source
        where = {"memory": "memory", "peer": f"memory of node {source.node}"}.get(source.kind)
        where = where or source.url or f"{source.tier} of node {source.node}"
        message = error.message if isinstance(error, HyperpodExtError) else str(error)
        return Refused(
            place_of(replace(here, rank=owner), nodes), f"step {self.step} of rank {owner} in {where}: {message}"
        )
