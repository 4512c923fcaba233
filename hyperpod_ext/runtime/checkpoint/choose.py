"""Which step to go on from, and where each rank gets it. Pure: plain values in, plain values out.

One coordinator decides for everybody. No rank ever picks "the latest" by itself: two ranks that do can
pick two different steps, and train on without an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hyperpod_ext.runtime.checkpoint.manifest import generation_of

Tier = Literal["live", "memory", "file", "s3"]


@dataclass(frozen=True, slots=True)
class Offer:
    """State that can be had at `step`."""

    tier: Tier
    """`live`: in a training process now. `memory`: whole in a node's memory server, that node's own or a
    replica. `file`, `s3`: a checkpoint of all ranks that has its manifest."""
    step: int
    rank: int
    """Rank whose state it is; -1 for a checkpoint of all."""
    node: int
    """Node where it is; -1 for a checkpoint of all."""
    save_id: str
    """Names the commit it is of: generation and step."""
    own_digest: str = ""
    """Digest of the part of it that may differ from rank to rank."""
    sharing: str = "same"
    """How it relates to other ranks' state: `same`, `alike` or a `shard`."""
    content: str = ""
    """Digest of all of it, where that is known."""
    world_size: int = 0
    """Ranks that the commit has; 0: as many as there are now."""
    url: str = ""
    folder: str = ""
    """Where a checkpoint of all lies."""

    @classmethod
    def of_memory(cls, brief: Mapping[str, Any], node: int) -> Offer:
        """What a node's memory server says of one snapshot."""
        return cls("memory", node=node, **{key: brief[key] for key in _OF_MEMORY})

    @classmethod
    def of_all(cls, brief: Mapping[str, Any]) -> Offer:
        """What a memory server says of one checkpoint in a durable tier."""
        return cls(rank=-1, node=-1, **{key: brief[key] for key in _OF_ALL})


_OF_MEMORY = ("step", "rank", "save_id", "own_digest", "sharing", "content", "world_size")
_OF_ALL = ("tier", "step", "save_id", "world_size", "url", "folder")


@dataclass(frozen=True, slots=True)
class Source:
    """Where one rank gets its state. `self`: it holds it already; `fresh`: it starts from nothing."""

    kind: Literal["self", "live", "memory", "peer", "file", "s3", "fresh"]
    rank: int
    save_id: str = ""
    node: int = -1
    """Node of a peer's memory."""
    url: str = ""
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """What every rank restores, in one generation."""

    step: int
    sources: dict[int, tuple[Source, ...]]
    """Of each rank: one source, or, when the world size changes, one for each rank of the commit."""

    def source(self, rank: int) -> Source:
        """The first source of a rank."""
        return self.sources[rank][0]

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "sources": {str(rank): [asdict(source) for source in sources] for rank, sources in self.sources.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Decision:
        sources = {int(rank): tuple(Source(**one) for one in several) for rank, several in data["sources"].items()}
        return cls(step=int(data["step"]), sources=sources)


def choose_step(
    offers: Collection[Offer], nodes: Mapping[int, int], began: Mapping[int, int] | None = None
) -> Decision | None:
    """The newest step that every rank can have, each from its nearest place; None when there is none.

    Args:
        offers: what is held anywhere, refused candidates already taken out.
        nodes: node of each rank of the new generation.
        began: step at which each generation began: what an earlier one did after it was given up.
    """
    alive = [offer for offer in offers if not _given_up(offer, began or {})]
    agree = _agree(alive)
    # parts of one state must be of one commit: two of the same step may come from two generations
    commits = {(offer.step, generation_of(offer.save_id), offer.save_id) for offer in alive}
    for step, _, save_id in sorted(commits, reverse=True):
        usable = [offer for offer in alive if offer.save_id == save_id]
        world_sizes = {offer.world_size or len(nodes) for offer in usable}
        for world_size in sorted(world_sizes, key=lambda size: size != len(nodes)):
            of_this = [offer for offer in usable if (offer.world_size or len(nodes)) == world_size]
            sources = _sources(of_this, nodes, world_size, agree)
            if sources is not None:
                return Decision(step, sources)
    return None


def _sources(
    offers: Sequence[Offer], nodes: Mapping[int, int], world_size: int, agree: bool
) -> dict[int, tuple[Source, ...]] | None:
    """Sources of every rank at one commit, or None when one of them has none."""
    any_will_do = agree and _interchangeable(offers)
    resized = world_size != len(nodes)
    sources: dict[int, tuple[Source, ...]] = {}
    for rank, node in nodes.items():
        wanted = range(world_size) if resized and not any_will_do else [rank]
        found = [_nearest(offers, rank, one, node, any_will_do, resized) for one in wanted]
        if any(source is None for source in found):
            return None
        sources[rank] = tuple(source for source in found if source is not None)
    return sources


def _given_up(offer: Offer, began: Mapping[int, int]) -> bool:
    generation = generation_of(offer.save_id)
    return any(later > generation and step < offer.step for later, step in began.items())


def _agree(offers: Collection[Offer]) -> bool:
    """Whether nobody has ever seen two ranks differ at one commit."""
    digests: dict[str, set[str]] = {}
    contents: dict[str, set[str]] = {}
    for offer in offers:
        if offer.rank >= 0:
            digests.setdefault(offer.save_id, set()).add(offer.own_digest)
            if offer.content:
                contents.setdefault(offer.save_id, set()).add(offer.content)
    return all(len(each) == 1 for each in (*digests.values(), *contents.values()))


def _interchangeable(offers: Collection[Offer]) -> bool:
    """Whether one rank's state serves any other. What no one keeps equal needs two ranks to show that it is."""
    each = [offer for offer in offers if offer.rank >= 0]
    kinds = {offer.sharing for offer in each}
    if not each or "shard" in kinds:
        return False
    return kinds == {"same"} or len({offer.rank for offer in each}) > 1


def is_replicated(offers: Collection[Offer]) -> bool:
    """Whether every rank's state is the same, as far as anybody has seen."""
    return _agree(offers) and not any(offer.sharing == "shard" for offer in offers)


def start_fresh(nodes: Mapping[int, int]) -> Decision:
    """Step 0 from nothing, on every rank."""
    return Decision(0, {rank: (Source("fresh", rank),) for rank in nodes})


def _nearest(
    offers: Collection[Offer], rank: int, wanted: int, node: int, any_will_do: bool, resized: bool
) -> Source | None:
    """Cheapest place where `rank` can get the state of rank `wanted`.

    In order: itself, memory of its node, a live peer, memory of another node, a shared directory, S3. Its own
    state comes before another's that is equal, and load spreads by rank among equals.
    """
    best: tuple[tuple[int, bool, bool, int], Source] | None = None
    for offer in offers:
        everybody = offer.rank < 0
        if not everybody and offer.rank != wanted and not any_will_do:
            continue
        own = offer.rank == wanted
        near = offer.node == node
        if offer.tier == "live":
            if resized and not any_will_do:
                continue  # a live rank sends all of its state or nothing
            itself = own and wanted == rank and not resized
            source = Source("self" if itself else "live", offer.rank, offer.save_id)
            place = 0 if itself else 2
        elif offer.tier == "memory":
            source = Source("memory" if near else "peer", offer.rank, offer.save_id, node=offer.node)
            place = 1 if near else 3
        else:
            source = Source(offer.tier, wanted, offer.save_id, url=offer.url, folder=offer.folder)
            place = 4 if offer.tier == "file" else 5
        cost = (place, not own, not near, (offer.rank - rank) % 1_000_000)
        if best is None or cost < best[0]:
            best = (cost, source)
    return best[1] if best else None
