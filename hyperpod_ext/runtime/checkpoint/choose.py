"""Which step to go on from, and where each rank gets it. Pure: plain values in, plain values out.

One coordinator decides for everybody. No rank ever picks "the latest" by itself: two ranks that do can
pick two different steps, and train on without an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Offer:
    """State that some process can give at `step`."""

    tier: Literal["live", "memory"]
    """`live`: in a training process now. `memory`: sealed in a node's memory server."""
    step: int
    rank: int
    """Rank whose state it is."""
    node: int
    """Node where it is."""
    save_id: str
    """Names the commit it is of: generation and step."""
    own_digest: str = ""
    """Digest of the part of it that may differ from rank to rank."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where one rank gets its state. `self`: it holds it already; `fresh`: it starts from nothing."""

    kind: Literal["self", "live", "memory", "fresh"]
    rank: int
    save_id: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """What every rank restores, in one generation."""

    step: int
    sources: dict[int, Source]

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "sources": {str(rank): asdict(source) for rank, source in self.sources.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Decision:
        sources = {int(rank): Source(**source) for rank, source in data["sources"].items()}
        return cls(step=int(data["step"]), sources=sources)


def choose_step(offers: Collection[Offer], nodes: Mapping[int, int]) -> Decision | None:
    """The newest step that every rank can have, each from its nearest place; None when there is none.

    Args:
        offers: what is held anywhere, refused candidates already taken out.
        nodes: node of each rank of the new generation.
    """
    any_will_do = is_replicated(offers)
    for step in sorted({offer.step for offer in offers}, reverse=True):
        at_step = [offer for offer in offers if offer.step == step]
        # parts of one state must be of one commit: two of the same step may come from two generations
        commits = [""] if any_will_do else sorted({offer.save_id for offer in at_step}, reverse=True)
        for commit in commits:
            usable = [offer for offer in at_step if commit in ("", offer.save_id)]
            sources = {rank: _nearest(usable, rank, node, any_will_do) for rank, node in nodes.items()}
            if all(source is not None for source in sources.values()):
                return Decision(step, {rank: source for rank, source in sources.items() if source is not None})
    return None


def is_replicated(offers: Collection[Offer]) -> bool:
    """Whether every rank's state is the same, as far as anybody has seen: at no step do two ranks' differ."""
    digests: dict[int, set[str]] = {}
    for offer in offers:
        digests.setdefault(offer.step, set()).add(offer.own_digest)
    return all(len(at_step) == 1 for at_step in digests.values())


def start_fresh(nodes: Mapping[int, int]) -> Decision:
    """Step 0 from nothing, on every rank."""
    return Decision(0, {rank: Source("fresh", rank) for rank in nodes})


def _nearest(offers: Collection[Offer], rank: int, node: int, any_will_do: bool) -> Source | None:
    """Cheapest place for `rank`: itself, its own snapshot, another's on its node, a live peer.

    Live peers on the same node come before others, and load spreads by rank among equals.
    """
    best: tuple[tuple[int, bool, int], Source] | None = None
    for offer in offers:
        if offer.rank != rank and not any_will_do:
            continue
        if offer.tier == "live":
            place = 0 if offer.rank == rank else 3
            source = Source("self" if offer.rank == rank else "live", offer.rank, offer.save_id)
        elif offer.node == node:
            place = 1 if offer.rank == rank else 2
            source = Source("memory", offer.rank, offer.save_id)
        else:
            continue  # another node's memory: the peer tier's business
        cost = (place, offer.node != node, (offer.rank - rank) % 1_000_000)
        if best is None or cost < best[0]:
            best = (cost, source)
    return best[1] if best else None
