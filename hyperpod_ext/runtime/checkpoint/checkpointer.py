"""Snapshots of one rank's state into its node's memory server, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hyperpod_ext.runtime.checkpoint.image import Layout, copy_all
from hyperpod_ext.runtime.checkpoint.tree import Skeleton
from hyperpod_ext.runtime.memory_server.client import Mapping, MemoryClient


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state as it was saved: private copies, verified."""

    step: int
    skeleton: Skeleton
    tensors: list[torch.Tensor]
    extras: dict[str, Any]


class Checkpointer:
    """Saves by copying into shared memory that outlives this process; the seal runs beside training.

    Args:
        client: line to the node's memory server.
        rank: owner of the snapshots.
        job: the job's name; a snapshot of another job is refused.
        secret: the job's, checks the manifests.
    """

    def __init__(self, client: MemoryClient, rank: int, *, job: str, secret: bytes) -> None:
        self._client, self._rank, self._job, self._secret = client, rank, job, secret
        self._layout: Layout | None = None
        self._mapping: Mapping | None = None
        self._views: list[list[torch.Tensor]] = []

    def save(
        self,
        step: int,
        save_id: str,
        generation: int,
        skeleton: Skeleton,
        tensors: list[torch.Tensor],
        extras: dict[str, Any],
        *,
        own_digest: str = "",
        skip_when_busy: bool = False,
    ) -> bool:
        """Copy the state into the free slot and have it sealed. Returns False when it was skipped.

        Blocks for one copy of the state (and for a seal still in flight, unless `skip_when_busy`).

        Raises:
            MemoryTierFullError: the node's memory tier has no room; what it holds is untouched.
            StaleGenerationError: a newer generation is at work.
        """
        if skip_when_busy and self._client.busy():
            return False
        layout = self._lay_out(tensors)
        slot = self._client.begin(self._rank, step, save_id, generation)
        copy_all(tensors, self._views[slot])
        record = {
            "save_id": save_id,
            "generation": generation,
            "own_digest": own_digest,
            "nbytes": layout.nbytes,
            "skeleton": skeleton,
            "items": layout.to_json(),
            "extras": extras,
        }
        self._client.seal(self._rank, slot, record)
        return True

    def load(self, owner: int, save_id: str) -> Snapshot:
        """A snapshot held on this node, verified before a byte of it is used.

        Raises:
            NotFoundError: it is not held.
            CorruptSnapshotError: its manifest or its bytes are not what was sealed.
        """
        manifest, data = self._client.read(owner, save_id, secret=self._secret, job=self._job)
        layout = Layout.from_json(manifest["items"], int(manifest["nbytes"]))
        private = bytearray(data)  # the slot may be written again while the state is in use
        return Snapshot(int(manifest["step"]), manifest["skeleton"], layout.views(private), manifest["extras"])

    def flush(self) -> None:
        """Wait until the last save is sealed."""
        self._client.flush()

    def _lay_out(self, tensors: list[torch.Tensor]) -> Layout:
        """Layout of these tensors; maps memory and makes views only when it changed."""
        layout = Layout.of(tensors)
        if layout != self._layout or self._mapping is None:
            mapping = self._client.map(self._rank, layout.nbytes)
            self._views = [layout.views(mapping.memory, slot * mapping.slot_bytes) for slot in range(mapping.slots)]
            self._layout, self._mapping = layout, mapping
        return layout
