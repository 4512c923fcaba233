"""Parity over a group of ranks on different nodes: cutting images, and rebuilding a lost one. Pure.

The images of k ranks are cut into k - 1 parts each. The node of every rank keeps one parity piece: the XOR of one part
of each other rank's image. So each image is sent once, as for one copy, and a node stores 1/(k - 1) of an image. Each
part of a lost image is the XOR of a piece with the other images' parts in that piece.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

_ALIGNED = 64
"""Parts begin at multiples of this, so that XOR works on whole words."""


class Span(NamedTuple):
    """Bytes of an image."""

    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Stripe:
    """Ranks with images that protect each other, one on each node of a group, in ascending order."""

    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) < 3 or list(self.ranks) != sorted(set(self.ranks)):
            raise ValueError(f"{self.ranks} are no ranks in order, or too few for parity")

    def piece_bytes(self, nbytes: int) -> int:
        """Return the size of a piece for images of `nbytes`. Shorter parts are padded with zeros."""
        parts = len(self.ranks) - 1
        return -(-nbytes // (parts * _ALIGNED)) * _ALIGNED

    def span(self, owner: int, holder: int, nbytes: int) -> Span:
        """Return the part of the owner's image of `nbytes` in the piece on the holder's node."""
        length = self.piece_bytes(nbytes)
        start = min(self._part(owner, holder) * length, nbytes)
        return Span(start, min(length, nbytes - start))

    def spans(self, owner: int, nbytes: int) -> dict[int, Span]:
        """Return the parts of an image in order, by the rank whose node keeps the part."""
        others = sorted((rank for rank in self.ranks if rank != owner), key=lambda rank: self._part(owner, rank))
        return {holder: self.span(owner, holder, nbytes) for holder in others}

    def others(self, *ranks: int) -> tuple[int, ...]:
        return tuple(rank for rank in self.ranks if rank not in ranks)

    def _part(self, owner: int, holder: int) -> int:
        if owner == holder:
            raise ValueError(f"rank {owner} keeps no part of its own image as parity")
        return (self.ranks.index(holder) - self.ranks.index(owner) - 1) % len(self.ranks)


def beyond_parity(step: int, ranks: Collection[int]) -> str:
    """Return the message for a step that parity cannot rebuild."""
    missing = ", ".join(map(str, sorted(ranks)))
    return f"Parity of step {step} makes up for one node of a group; missing are the snapshots of ranks {missing}."
