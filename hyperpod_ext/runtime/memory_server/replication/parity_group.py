"""Which nodes and ranks share parity with a given node. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hyperpod_ext.runtime.snapshot.parity import Stripe


@dataclass(frozen=True)
class ParityGroup:
    """The parity group that contains `node`. A stripe is a set of ranks, one per node of the group, that share parity:
    the first ranks of all nodes form a stripe, the second ranks of all nodes the next stripe, and so on."""

    node: int
    ranks: Mapping[int, tuple[int, ...]]
    """Ranks of each node in the group."""

    @classmethod
    def of(cls, node: int, ranks: Mapping[int, tuple[int, ...]]) -> ParityGroup | None:
        """Return the parity group of the nodes in `ranks`; None if the nodes form no group that contains `node`."""
        counts = {len(each) for each in ranks.values()}
        return cls(node, dict(ranks)) if node in ranks and len(ranks) > 2 and len(counts) == 1 else None

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(node for node in sorted(self.ranks) if node != self.node)

    def stripe(self, rank: int) -> Stripe | None:
        """Return the stripe that contains `rank`. None if the rank is on no node of the group."""
        for ranks in self.ranks.values():
            if rank in ranks:
                place = sorted(ranks).index(rank)
                return Stripe(tuple(sorted(sorted(each)[place] for each in self.ranks.values())))
        return None

    def node_of(self, rank: int) -> int:
        return next(node for node, ranks in self.ranks.items() if rank in ranks)

    def holder(self, stripe: Stripe) -> int:
        """Return the rank of this node that is in `stripe`."""
        return next(rank for rank in stripe.ranks if rank in self.ranks[self.node])
