"""Which step to go on from, and where each rank gets it. Pure: plain values in, plain values out.

One coordinator decides for everybody. No rank ever picks "the latest" by itself: two ranks that do can
pick two different steps, and train on without an error.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, Literal, Protocol

from hyperpod_ext.config.checkpoint import DURABLE
from hyperpod_ext.runtime.snapshot.manifest import generation_of, save_id_in, without_run
from hyperpod_ext.runtime.snapshot.sharing import Sharing

OfferTier = Literal["live", "memory", "parity", "durable"]
OfferKey = tuple[str, int, int, str, str]
"""Tier, rank, node, save id and URL of an offer: what a refused one is known by."""

_AT_ONCE = 4
"""Live ranks that one joining worker takes parts from at the same time."""


@dataclass(frozen=True, slots=True)
class Offer:
    """State that can be had at `step`."""

    tier: OfferTier
    """`live`: in a training process now. `memory`: whole in a node's memory server, that node's own or a
    replica. `parity`: a whole parity piece, which says nothing alone. `durable`: a checkpoint of all ranks that has its
    manifest, or one rank's snapshot on the disk of `node`."""
    step: int
    rank: int
    """Rank whose state it is, or whose node keeps the piece; -1 for a checkpoint of all."""
    node: int
    """Node where it is; -1 for a checkpoint of all."""
    save_id: str
    """Names the commit it is of: generation and step."""
    own_digest: str = ""
    """Digest of the part of it that may differ from rank to rank."""
    sharing: str = "same"
    """How it relates to other ranks' state: `same`, `alike`, a `shard`, or among whom (see `sharing.py`)."""
    content: str = ""
    """Digest of all of it, where that is known."""
    world_size: int = 0
    """Ranks that the commit has; 0: as many as there are now."""
    url: str = ""
    folder: str = ""
    """Where a checkpoint of all lies."""
    name: str = ""
    """Kind of the durable tier."""
    began: int = -1
    """Of a disk: step at which the snapshot's generation began, which gives up what earlier ones made after it."""
    stripe: tuple[int, ...] = ()
    """Of a parity piece: the ranks whose images protect each other."""

    @property
    def key(self) -> OfferKey:
        return (self.tier, self.rank, self.node, self.save_id, self.url if self.node < 0 else "")

    @classmethod
    def of_memory(cls, summary: Mapping[str, Any], node: int) -> Offer:
        """What a node's memory server says of one snapshot."""
        return cls("memory", node=node, **{key: summary[key] for key in _OF_MEMORY})

    @classmethod
    def of_disk(cls, summary: Mapping[str, Any], node: int, run: str) -> Offer:
        """What a node's memory server says of one snapshot on the node's disk, in this `run` of the job."""
        given = {key: summary[key] for key in (*_OF_MEMORY, "url", "folder", "began")}
        given["save_id"] = save_id_in(summary["save_id"], summary["run"] if summary["run"] != run else "")
        return cls("durable", node=node, name=summary["tier"], **given)

    @classmethod
    def of_piece(cls, summary: Mapping[str, Any], node: int) -> Offer:
        """What a node's memory server says of one parity piece."""
        given = {key: summary[key] for key in ("step", "rank", "save_id", "world_size")}
        return cls("parity", node=node, sharing="shard", stripe=tuple(summary["stripe"]), **given)

    @classmethod
    def of_all(cls, summary: Mapping[str, Any]) -> Offer:
        """What a memory server says of one checkpoint in a durable tier."""
        given = {key: summary[key] for key in _OF_ALL}
        return cls("durable", rank=-1, node=-1, name=summary["tier"], **given)


_OF_MEMORY = ("step", "rank", "save_id", "own_digest", "sharing", "content", "world_size")
_OF_ALL = ("step", "save_id", "world_size", "url", "folder")


@dataclass(frozen=True, slots=True)
class Source:
    """Where one rank gets its state. `self`: it holds it already; `fresh`: it starts from nothing; `parity`: it is
    rebuilt from the image of `rank` and the piece that lie on `node`, and from those of the other sources."""

    kind: Literal["self", "live", "memory", "peer", "parity", "durable", "fresh"]
    rank: int
    save_id: str = ""
    node: int = -1
    """Node of a peer's memory, or whose disk it is."""
    url: str = ""
    folder: str = ""
    """Of a durable tier. None on the disk of another node, whose memory server reads it."""
    tier: str = ""
    """Kind of the durable tier."""

    @property
    def on_another_disk(self) -> bool:
        """Whether it is read through the memory server of the node that has it on its disk."""
        return self.kind == "durable" and self.node >= 0 and not self.url

    @property
    def name(self) -> str:
        """For people: the kind of a durable tier, which they chose."""
        return self.tier or self.kind


def place_of(source: Source, nodes: Mapping[int, int]) -> OfferKey:
    """Of the offer that a source came from. `nodes`: the node of each rank."""
    match source.kind:
        case "memory" | "peer":
            return ("memory", source.rank, source.node, source.save_id, "")
        case "parity":
            return ("parity", source.rank, source.node, source.save_id, "")
        case "durable" if source.node >= 0:
            return ("durable", source.rank, source.node, source.save_id, "")
        case "durable":
            return ("durable", -1, -1, source.save_id, source.url)
        case _:
            return ("live", source.rank, nodes[source.rank], source.save_id, "")


@dataclass(frozen=True, slots=True)
class Decision:
    """What every rank restores, in one generation."""

    step: int
    sources: dict[int, tuple[Source, ...]]
    """Of each rank: one source; several `live` ones, of which each sends a part; `parity` ones, which are needed
    together; or, when the world size changes, one for each rank of the commit. What a rank is told leaves out those
    that it need not know."""
    world_size: int = 0
    """Ranks of the generation; 0: as many as there are sources."""

    def source(self, rank: int) -> Source:
        """The first source of a rank."""
        return self.sources[rank][0]

    @property
    def stored(self) -> list[str]:
        """URLs of the durable tiers that ranks restore from."""
        every = (source for sources in self.sources.values() for source in sources)
        return sorted({source.url for source in every if source.url})

    @property
    def checkpoint(self) -> str:
        """Place of the durable checkpoint that the first rank restores from; empty: its state is in some memory."""
        source = next((several[0] for several in self.sources.values()), None)
        if source is None or source.kind != "durable":
            return ""
        on_node = f"{without_run(source.save_id)[0]} on the disk of node {source.node}"
        return on_node if source.on_another_disk else f"{source.url}/{source.folder}"

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
    given_up = given_up_by(began or {})
    alive = [offer for offer in offers if not given_up(offer)]
    differing = _differing(alive)
    # parts of one state must be of one commit: two of the same step may come from two generations
    commits: dict[tuple[int, int, str], list[Offer]] = {}
    for offer in alive:
        commits.setdefault(commit_of(offer), []).append(offer)
    for key in sorted(commits, reverse=True):
        usable = commits[key]
        world_sizes = {offer.world_size or len(nodes) for offer in usable}
        for world_size in sorted(world_sizes, key=lambda size: size != len(nodes)):
            of_this = [offer for offer in usable if (offer.world_size or len(nodes)) == world_size]
            sources = _sources(of_this, nodes, world_size, differing)
            if sources is not None:
                return Decision(key[0], sources)
    return None


def _sources(
    offers: Sequence[Offer], nodes: Mapping[int, int], world_size: int, differing: Collection[_Holders]
) -> dict[int, tuple[Source, ...]] | None:
    """Sources of every rank at one commit, or None when one of them has none."""
    resized = world_size != len(nodes)
    live = {} if resized else {offer.rank: offer.save_id for offer in offers if offer.tier == "live"}
    sources: dict[int, tuple[Source, ...]] = {}
    sources |= {rank: (Source("self", rank, live[rank]),) for rank in nodes if rank in live}  # it has what it needs
    if len(sources) == len(nodes):
        return sources
    commit = _Commit(offers, differing)
    any_will_do = None in commit.serving
    for rank, node in nodes.items():
        if rank in live:
            continue
        wanted = range(world_size) if resized and not any_will_do else [rank]
        found = [commit.nearest(rank, one, node, resized) for one in wanted]
        if not all(found):
            return None
        if len(found) == 1 and found[0][0].kind == "live":  # each sends a part, all at once
            sources[rank] = tuple(found[0][:_AT_ONCE])
        elif len(found) == 1 and found[0][0].kind == "parity":
            sources[rank] = tuple(found[0])
        else:
            sources[rank] = tuple(one[0] for one in found)
    return sources


class OfCommit(Protocol):
    """Anything that is of one commit."""

    @property
    def step(self) -> int: ...

    @property
    def save_id(self) -> str: ...


def commit_of(one: OfCommit) -> tuple[int, int, str]:
    """Commits in the order in which they are preferred, the best one last."""
    return one.step, generation_of(one.save_id), one.save_id


def given_up_by(began: Mapping[int, int]) -> Callable[[OfCommit], bool]:
    """Whether something was made after a later generation had gone on from less. Many are of few commits."""

    @functools.cache
    def given_up(save_id: str, step: int) -> bool:
        generation = generation_of(save_id)
        return any(later > generation and first < step for later, first in began.items())

    return lambda one: given_up(one.save_id, one.step)


def began_on_disk(offers: Collection[Offer]) -> dict[int, int]:
    """Step at which each generation began that saved something on a disk. A node that was not in it does not know."""
    began: dict[int, int] = {}
    for offer in offers:
        if offer.began >= 0:  # two runs may both have numbered one so: the lower step gives up more
            generation = generation_of(offer.save_id)
            began[generation] = min(offer.began, began.get(generation, offer.began))
    return began


_Holders = frozenset[int] | None
"""Ranks that are said to hold the same state; None: all of them."""


def _holders(offer: Offer) -> _Holders:
    sharing = Sharing.of(offer.sharing)
    return frozenset([offer.rank]) if sharing.kind == "shard" else sharing.ranks


def _differing(offers: Collection[Offer]) -> set[_Holders]:
    """Of ranks that are said to hold the same state, those of which two were ever seen to differ at one commit."""
    digests: dict[tuple[str, _Holders], set[str]] = {}
    contents: dict[tuple[str, _Holders], set[str]] = {}
    for offer in offers:
        if offer.rank >= 0 and offer.tier != "parity":
            key = offer.save_id, _holders(offer)
            digests.setdefault(key, set()).add(offer.own_digest)
            if offer.content:
                contents.setdefault(key, set()).add(offer.content)
    return {holders for each in (digests, contents) for (_, holders), seen in each.items() if len(seen) > 1}


def short_parity(offers: Collection[Offer], began: Mapping[int, int], after: int) -> tuple[int, tuple[int, ...]] | None:
    """The newest step above `after` that has parity which does not do, and the ranks of one group whose memory was lost
    since: two or more, where parity makes up for one. A rank that has overwritten its snapshot of it lost none."""
    given_up = given_up_by(began)
    images: set[tuple[str, int]] = set()
    oldest: dict[int, int] = {}
    for one in offers:
        if one.tier == "memory":
            images.add((one.save_id, one.rank))
            oldest[one.rank] = min(generation_of(one.save_id), oldest.get(one.rank, generation_of(one.save_id)))

    def lost(piece: Offer) -> tuple[int, ...]:
        generation = generation_of(piece.save_id)
        missing = [rank for rank in piece.stripe if (piece.save_id, rank) not in images]
        return tuple(rank for rank in missing if oldest.get(rank, generation + 1) > generation)

    pieces = [one for one in offers if one.tier == "parity" and one.step > after and not given_up(one)]
    short = [(commit_of(piece), lost(piece)) for piece in pieces]
    short = [(commit, ranks) for commit, ranks in short if len(ranks) > 1]
    if not short:
        return None
    newest, ranks = max(short, key=lambda found: (found[0], [-rank for rank in found[1]]))
    return newest[0], ranks


def start_fresh(nodes: Mapping[int, int]) -> Decision:
    """Step 0 from nothing, on every rank."""
    return Decision(0, {rank: (Source("fresh", rank),) for rank in nodes})


class _Equals:
    """Offers of ranks that hold the same, any of which will do for each of them."""

    _FEW = 64

    def __init__(self, offers: Sequence[Offer]) -> None:
        self._offers = offers
        self._by_node: dict[int, list[Offer]] = {}
        self._by_rank: dict[int, list[Offer]] = {}
        self._by_tier: dict[OfferTier, list[Offer]] = {}
        if len(offers) > self._FEW:
            for offer in sorted(offers, key=attrgetter("rank")):
                self._by_node.setdefault(offer.node, []).append(offer)
                self._by_rank.setdefault(offer.rank, []).append(offer)
                self._by_tier.setdefault(offer.tier, []).append(offer)

    def near(self, rank: int, wanted: int, node: int) -> Sequence[Offer]:
        """Those of them that can be the nearest to `rank`: of its node, of the rank itself, or next by number."""
        if len(self._offers) <= self._FEW:
            return self._offers
        near = [*self._by_node.get(node, ()), *self._by_rank.get(wanted, ())]
        for offers in self._by_tier.values():
            first = bisect_left(offers, rank, key=attrgetter("rank"))
            near += [*offers[first : first + _AT_ONCE], *offers[: max(0, first + _AT_ONCE - len(offers))]]
        return near


class _Commit:
    """What is held of one commit, by the rank that it serves."""

    def __init__(self, offers: Sequence[Offer], differing: Collection[_Holders]) -> None:
        self._everybody = [offer for offer in offers if offer.rank < 0]
        self._pieces = [offer for offer in offers if offer.tier == "parity"]
        self._own: dict[int, list[Offer]] = {}
        together: dict[_Holders, list[Offer]] = {}
        for offer in offers:
            if offer.rank >= 0 and offer.tier != "parity":
                self._own.setdefault(offer.rank, []).append(offer)
                together.setdefault(_holders(offer), []).append(offer)
        self.serving = {
            holders: theirs
            for holders, theirs in together.items()
            if holders not in differing and _interchangeable(theirs) and (holders is not None or len(together) == 1)
        }
        """Offers of ranks whose state serves all that hold the same."""
        self._serving_rank: dict[int, list[Offer]] = {}
        for holders, theirs in self.serving.items():
            for rank in holders or ():
                self._serving_rank.setdefault(rank, []).extend(theirs)
        self._made: dict[int | None, _Equals] = {}

    def _equals(self, rank: int | None) -> _Equals:
        """Offers that serve `rank`; None: that serve all. Sorted for those alone that need a source."""
        if rank not in self._made:
            self._made[rank] = _Equals(self.serving[None] if rank is None else self._serving_rank.get(rank, ()))
        return self._made[rank]

    def nearest(self, rank: int, wanted: int, node: int, resized: bool) -> list[Source]:
        """Where `rank` can get the state of rank `wanted`, the cheapest place first.

        In order: memory of its node, a live peer, the node's disk, memory of another node, its disk, parity, a shared
        directory, S3. Its own state comes before another's that is equal, and load spreads by rank among equals.
        """
        own = [*self._own.get(wanted, ()), *self._everybody]
        others = self._equals(None if None in self.serving else wanted).near(rank, wanted, node)
        found: dict[Source, tuple[int, bool, bool, int]] = {}
        for offer in (*own, *others):
            if offer.tier == "live" and resized:
                continue  # a live rank sends all of its state or nothing, and only to ranks of its own world
            source, place = _source(offer, rank, wanted, node, resized)
            cost = (place, offer.rank != wanted, offer.node != node, (offer.rank - rank) % 1_000_000)
            found[source] = min(cost, found.get(source, cost))
        ordered = sorted(found, key=found.__getitem__)
        if self._pieces and not resized and (not ordered or (ordered[0].kind == "durable" and ordered[0].node < 0)):
            ordered = self._rebuilt(wanted) or ordered
        return [source for source in ordered if source.kind == ordered[0].kind]

    def _rebuilt(self, lost: int) -> list[Source]:
        """What the state of a rank is rebuilt from: of each other rank of its stripe the image, and the piece that the
        same node keeps. None where one of them is missing, as when two nodes of a group are lost."""
        by_stripe: dict[tuple[int, ...], dict[tuple[int, int], Offer]] = {}
        for piece in self._pieces:
            if lost in piece.stripe and piece.rank != lost:
                by_stripe.setdefault(piece.stripe, {})[piece.rank, piece.node] = piece
        for stripe, pieces in sorted(by_stripe.items()):
            sources = []
            for rank in stripe:
                images = [one for one in self._own.get(rank, ()) if one.tier == "memory" and rank != lost]
                nodes = [one.node for one in images if (rank, one.node) in pieces]
                sources += [Source("parity", rank, pieces[rank, node].save_id, node=node) for node in nodes[:1]]
            if len(sources) == len(stripe) - 1:
                return sources
        return []


def _source(offer: Offer, rank: int, wanted: int, node: int, resized: bool) -> tuple[Source, int]:
    """An offer as `rank` sees it that needs the state of rank `wanted`, and how far away that is."""
    near = offer.node == node
    if offer.tier == "live":
        itself = offer.rank == wanted == rank and not resized
        return Source("self" if itself else "live", offer.rank, offer.save_id), 0 if itself else 2
    if offer.tier == "memory":
        kind: Literal["memory", "peer"] = "memory" if near else "peer"
        return Source(kind, offer.rank, offer.save_id, node=offer.node), 1 if near else 4
    if offer.node >= 0:
        there = {"url": offer.url, "folder": offer.folder} if near else {}
        source = Source("durable", offer.rank, offer.save_id, node=offer.node, tier=offer.name, **there)
        return source, DURABLE[offer.name].distance + (0 if near else 2)
    source = Source("durable", wanted, offer.save_id, url=offer.url, folder=offer.folder, tier=offer.name)
    return source, DURABLE[offer.name].distance


def _interchangeable(offers: Collection[Offer]) -> bool:
    """Whether one rank's state serves the others that hold the same. What no one keeps equal needs two ranks to show
    that it is."""
    kinds = {Sharing.of(offer.sharing).kind for offer in offers}
    return kinds == {"same"} or ("shard" not in kinds and len({offer.rank for offer in offers}) > 1)
