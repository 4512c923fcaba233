"""The nodes that keep parity for each other's snapshots, as one of these nodes sees them. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hyperpod_ext.runtime.snapshot.parity import Stripe


@dataclass(frozen=True)
class ParityGroup:
    """One group that contains `node`. The first ranks of all its nodes form a stripe, the second ranks the next stripe,
    and so on."""

    node: int
    ranks: Mapping[int, tuple[int, ...]]
    """Ranks of each node in the group."""

    @classmethod
    def of(cls, node: int, ranks: Mapping[int, tuple[int, ...]]) -> ParityGroup | None:
        """Return the group of these nodes. None if they do not form a group with `node`."""
        counts = {len(each) for each in ranks.values()}
        return cls(node, dict(ranks)) if node in ranks and len(ranks) > 2 and len(counts) == 1 else None

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(node for node in sorted(self.ranks) if node != self.node)

    def stripe(self, rank: int) -> Stripe | None:
        """Return the stripe of a rank of these nodes. None if the rank is in no stripe."""
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
