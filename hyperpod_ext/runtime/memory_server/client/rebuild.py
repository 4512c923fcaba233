"""Rebuilds a lost rank's snapshot from the other images of its stripe and from parity pieces on their nodes."""

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
    """A snapshot to rebuild, with a verified manifest. The caller must compare the bytes from `load` with the
    manifest."""

    manifest: Manifest
    plan: Plan
    _lost: int
    _stripe: Stripe
    _nbytes: Mapping[int, Mapping[int, int]]
    """Length of each image that has a part in a piece, by the rank under which the piece is stored."""
    _peers: Mapping[int, PeerClient]

    @classmethod
    def open(cls, peers: Mapping[int, PeerClient], lost: int, save_id: str, *, job: str) -> Rebuilt:
        """Read the descriptions of the pieces of a lost rank's stripe.

        Args:
            peers: memory server of each other rank in the stripe, by rank. The server has the rank's image and
                one piece.

        Raises:
            NotFoundError: a node no longer has its piece.
            CorruptSnapshotError: the nodes have different manifests, or the manifests of another job.
            UnreachableError: a node is gone.
        """
        heads = {rank: peer.open_piece(rank, save_id, lost, job=job) for rank, peer in sorted(peers.items())}
        (first, plan), *others = heads.values()
        for rank, (head, _) in heads.items():
            if list(head.stripe) != sorted({lost, *peers}) or set(head.nbytes) != set(head.stripe) - {rank}:
                raise CorruptSnapshotError(
                    f"parity of {save_id} under rank {rank} is of other ranks than {list(peers)}"
                )
        if any(head.manifest != first.manifest or head.stripe != first.stripe for head, _ in others):
            raise CorruptSnapshotError(f"parity of {save_id}: nodes have different manifests of rank {lost}")
        nbytes = {rank: head.nbytes for rank, (head, _) in heads.items()}
        return cls(first.manifest, plan, lost, Stripe(tuple(first.stripe)), nbytes, peers)

    def load(self) -> memoryview:
        """Return the image, whose parts are all rebuilt at the same time.

        Raises:
            NotFoundError: an image or a piece no longer exists.
            UnreachableError: a node is gone.
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
