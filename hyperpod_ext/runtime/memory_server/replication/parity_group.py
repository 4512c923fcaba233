"""The nodes that keep parity of each other's snapshots, from the view of one of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hyperpod_ext.runtime.snapshot.parity import Stripe


@dataclass(frozen=True)
class ParityGroup:
    """One group, with `node` in it. The first ranks of all nodes form a stripe, the second ones another, and so on."""

    node: int
    ranks: Mapping[int, tuple[int, ...]]
    """Ranks of each node of the group."""

    @classmethod
    def of(cls, node: int, ranks: Mapping[int, tuple[int, ...]]) -> ParityGroup | None:
        """Return the group of these nodes; None if they are no group with `node`."""
        counts = {len(each) for each in ranks.values()}
        return cls(node, dict(ranks)) if node in ranks and len(ranks) > 2 and len(counts) == 1 else None

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(node for node in sorted(self.ranks) if node != self.node)

    def stripe(self, rank: int) -> Stripe | None:
        """Return the stripe of a rank of these nodes; None if it is in none."""
        for ranks in self.ranks.values():
            if rank in ranks:
                place = sorted(ranks).index(rank)
                return Stripe(tuple(sorted(sorted(each)[place] for each in self.ranks.values())))
        return None

    def node_of(self, rank: int) -> int:
        return next(node for node, ranks in self.ranks.items() if rank in ranks)

    def holder(self, stripe: Stripe) -> int:
        """Return this node's rank in a stripe."""
        return next(rank for rank in stripe.ranks if rank in self.ranks[self.node])
