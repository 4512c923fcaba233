"""Rebuilds the snapshot of a rank that was lost with its node. The snapshot is rebuilt from the snapshots of the other
ranks in its stripe (ranks on different nodes that share parity), and from parity pieces (XOR of parts of these
snapshots) on their nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hyperpod_ext.errors import CorruptSnapshotError
from hyperpod_ext.runtime.memory_server.client import peer_socket as ps
from hyperpod_ext.runtime.memory_server.client.peer_client import PeerClient
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.manifest import Manifest
from hyperpod_ext.runtime.snapshot.parity import Stripe
from hyperpod_ext.runtime.snapshot.xor import xor_into


@dataclass(frozen=True)
class Rebuilt:
    """A lost rank's snapshot that can be rebuilt. The manifest is verified; the caller must verify the bytes that
    `load` returns against the manifest."""

    manifest: Manifest
    plan: Plan
    _lost: int
    _stripe: Stripe
    _nbytes: Mapping[int, Mapping[int, int]]
    """Sizes of the snapshots that have parts in the parity pieces. The outer key is the rank under which a parity piece
    is stored, and the inner key is the rank of a snapshot."""
    _peers: Mapping[int, PeerClient]

    @classmethod
    def open(cls, peers: Mapping[int, PeerClient], lost: int, save_id: str, *, job: str) -> Rebuilt:
        """Read the descriptions of the parity pieces from which a lost rank's snapshot is rebuilt.

        Args:
            peers: by rank, the memory server of each other rank's node in the stripe, which has the rank's snapshot and
                one parity piece.

        Raises:
            NotFoundError: a node no longer has its parity piece.
            CorruptSnapshotError: the nodes have different manifests for the lost rank, or manifests of another job.
            UnreachableError: a node's memory server does not answer.
        """
        heads = {rank: peer.open_piece(rank, save_id, lost, job=job) for rank, peer in sorted(peers.items())}
        (first, plan), *others = heads.values()
        for rank, (head, _) in heads.items():
            if list(head.stripe) != sorted({lost, *peers}) or set(head.nbytes) != set(head.stripe) - {rank}:
                raise CorruptSnapshotError(
                    f"the parity piece of {save_id} at rank {rank} is of ranks {list(head.stripe)}, but ranks "
                    f"{sorted({lost, *peers})} are needed"
                )
        if any(head.manifest != first.manifest or head.stripe != first.stripe for head, _ in others):
            raise CorruptSnapshotError(f"parity of {save_id}: nodes have different manifests of rank {lost}")
        nbytes = {rank: head.nbytes for rank, (head, _) in heads.items()}
        return cls(first.manifest, plan, lost, Stripe(tuple(first.stripe)), nbytes, peers)

    def load(self) -> memoryview:
        """Return the lost rank's snapshot. Each part of the snapshot is rebuilt in its own thread.

        Raises:
            NotFoundError: a snapshot or a parity piece no longer exists.
            UnreachableError: a node's memory server does not answer.
        """
        image, save_id = memoryview(bytearray(self.plan.nbytes)), str(self.manifest["save_id"])
        spans = list(self._stripe.spans(self._lost, self.plan.nbytes).items())

        def work(index: int) -> None:
            holder, (start, nbytes) = spans[index]
            part = image[start : start + nbytes]
            if nbytes:
                self._peers[holder].read_piece_into(holder, save_id, 0, part)
            scratch = memoryview(bytearray(min(ps.CHUNK, nbytes)))
            for other in self._stripe.others(self._lost, holder):
                begins, length = self._stripe.span(other, holder, self._nbytes[holder][other])
                for at in range(0, min(length, nbytes), ps.CHUNK):
                    some = scratch[: min(ps.CHUNK, min(length, nbytes) - at)]
                    self._peers[other].read_into(other, save_id, begins + at, some)
                    xor_into(part[at : at + len(some)], some)

        if failures := ps.in_threads(work, len(spans), "rebuild"):
            raise failures[0]
        return image
