"""Parity over a group of ranks on different nodes, from which one lost snapshot can be rebuilt.

In a group of k ranks, each rank's snapshot is divided into k - 1 parts. The node of every rank stores one parity piece:
the XOR of one part of each other rank's snapshot. So each snapshot is sent over the network once, as for a replica, but
a node stores only 1/(k - 1) of a snapshot's bytes. A part of a lost snapshot is rebuilt as the XOR of the parity piece
that contains the part and of the other snapshots' parts in this piece.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

_ALIGNED = 64
"""Parts of a snapshot begin at multiples of this many bytes, so that XOR works on whole machine words."""


class Span(NamedTuple):
    """A contiguous range of a snapshot's bytes."""

    start: int
    """Offset of the first byte."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Stripe:
    """The ranks of a parity group, in ascending order: one rank on each of the group's nodes."""

    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) < 3 or list(self.ranks) != sorted(set(self.ranks)):
            raise ValueError(f"parity needs at least three ranks in ascending order, not {self.ranks}")

    def piece_bytes(self, nbytes: int) -> int:
        """Return the bytes of a parity piece for snapshots of up to `nbytes` bytes. Shorter snapshots are
        zero-padded."""
        parts = len(self.ranks) - 1
        return -(-nbytes // (parts * _ALIGNED)) * _ALIGNED

    def span(self, owner: int, holder: int, nbytes: int) -> Span:
        """Return the part of one rank's snapshot that is in the parity piece on another rank's node.

        Args:
            owner: rank of the snapshot. holder: rank whose node stores the parity piece. nbytes: length of the
                snapshot.
        """
        length = self.piece_bytes(nbytes)
        start = min(self._part(owner, holder) * length, nbytes)
        return Span(start, min(length, nbytes - start))

    def spans(self, owner: int, nbytes: int) -> dict[int, Span]:
        """Return the parts of a rank's snapshot in order, each by the rank whose node stores the part's parity.

        Args:
            owner: rank of the snapshot. nbytes: length of the snapshot.
        """
        others = sorted((rank for rank in self.ranks if rank != owner), key=lambda rank: self._part(owner, rank))
        return {holder: self.span(owner, holder, nbytes) for holder in others}

    def others(self, *ranks: int) -> tuple[int, ...]:
        return tuple(rank for rank in self.ranks if rank not in ranks)

    def _part(self, owner: int, holder: int) -> int:
        if owner == holder:
            raise ValueError(f"the parity piece of rank {owner} contains no part of its own image")
        return (self.ranks.index(holder) - self.ranks.index(owner) - 1) % len(self.ranks)


def beyond_parity(step: int, ranks: Collection[int]) -> str:
    """Return the message for a step that parity cannot rebuild, because snapshots of several ranks of a group are lost.

    Args:
        step: the step.
        ranks: ranks of the group whose snapshots are lost.
    """
    missing = ", ".join(map(str, sorted(ranks)))
    return f"Parity of step {step} can rebuild one node of a group, but the snapshots of ranks {missing} are missing."
