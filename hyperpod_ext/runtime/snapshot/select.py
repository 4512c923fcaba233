"""Choose the step to restore, and each rank's source of it. Pure: plain values in, plain values out.

One coordinator decides for all ranks. Ranks that each picked "the latest" could pick different steps, and train on
without an error.
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
"""Tier, rank, node, save ID and URL of an offer: the identity of refused offers."""

_AT_ONCE = 4
"""Number of live ranks that send parts to one joining worker at the same time."""


@dataclass(frozen=True, slots=True)
class Offer:
    """State available at `step`."""

    tier: OfferTier
    """`live`: in a training process now. `memory`: in a node's memory server, as original or replica. `parity`: a
    parity piece, of no use alone. `durable`: a committed checkpoint of all ranks, or one rank's snapshot on the disk of
    `node`."""
    step: int
    rank: int
    """Rank that owns the state, or whose node keeps the piece; -1 for a checkpoint of all."""
    node: int
    """Node with the state; -1 for a checkpoint of all."""
    save_id: str
    """Name of the commit: generation and step."""
    own_digest: str = ""
    """Digest of the part of the state that may differ between ranks."""
    sharing: str = "same"
    """Relation to other ranks' state: `same`, `alike` or `shard`, with the ranks (see `sharing.py`)."""
    content: str = ""
    """Digest of the whole state, if known."""
    world_size: int = 0
    """Number of ranks of the commit; 0: the present number."""
    url: str = ""
    folder: str = ""
    """Place of a checkpoint of all ranks."""
    name: str = ""
    """Kind of the durable tier."""
    began: int = -1
    """On a disk: first step of the snapshot's generation, which abandons later steps of earlier generations."""
    stripe: tuple[int, ...] = ()
    """Ranks in the stripe of a parity piece."""

    @property
    def key(self) -> OfferKey:
        return (self.tier, self.rank, self.node, self.save_id, self.url if self.node < 0 else "")

    @classmethod
    def of_memory(cls, summary: Mapping[str, Any], node: int) -> Offer:
        """Return the offer of a snapshot in a node's memory server."""
        return cls("memory", node=node, **{key: summary[key] for key in _OF_MEMORY})

    @classmethod
    def of_disk(cls, summary: Mapping[str, Any], node: int, run: str) -> Offer:
        """Return the offer of a snapshot on a node's disk, in this `run` of the job."""
        given = {key: summary[key] for key in (*_OF_MEMORY, "url", "folder", "began")}
        given["save_id"] = save_id_in(summary["save_id"], summary["run"] if summary["run"] != run else "")
        return cls("durable", node=node, name=summary["tier"], **given)

    @classmethod
    def of_piece(cls, summary: Mapping[str, Any], node: int) -> Offer:
        """Return the offer of a parity piece in a node's memory server."""
        given = {key: summary[key] for key in ("step", "rank", "save_id", "world_size")}
        return cls("parity", node=node, sharing="shard", stripe=tuple(summary["stripe"]), **given)

    @classmethod
    def of_all(cls, summary: Mapping[str, Any]) -> Offer:
        """Return the offer of a checkpoint in a durable tier."""
        given = {key: summary[key] for key in _OF_ALL}
        return cls("durable", rank=-1, node=-1, name=summary["tier"], **given)


_OF_MEMORY = ("step", "rank", "save_id", "own_digest", "sharing", "content", "world_size")
_OF_ALL = ("step", "save_id", "world_size", "url", "folder")


@dataclass(frozen=True, slots=True)
class Source:
    """Source of one rank's state. `self`: the rank holds it already; `fresh`: it starts without state; `parity`: it is
    rebuilt from the image of `rank` and the piece on `node`, together with the other sources."""

    kind: Literal["self", "live", "memory", "peer", "parity", "durable", "fresh"]
    rank: int
    save_id: str = ""
    node: int = -1
    """Node of the peer's memory, or of the disk."""
    url: str = ""
    folder: str = ""
    """Place in a durable tier; empty for another node's disk, which is read through its memory server."""
    tier: str = ""
    """Kind of the durable tier."""

    @property
    def on_another_disk(self) -> bool:
        """Whether the state is read through the memory server of another node, from its disk."""
        return self.kind == "durable" and self.node >= 0 and not self.url

    @property
    def name(self) -> str:
        """Name for messages: the kind of a durable tier, or else the source's kind."""
        return self.tier or self.kind


def place_of(source: Source, nodes: Mapping[int, int]) -> OfferKey:
    """Return the key of a source's offer. `nodes`: the node of each rank."""
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
    """The step and sources that all ranks restore, in one generation."""

    step: int
    sources: dict[int, tuple[Source, ...]]
    """Sources of each rank: one; several `live` ones that each send a part; `parity` ones, which are needed together;
    or, when the world size changes, one for each rank of the commit. The message to a rank has only the sources that
    the rank needs."""
    world_size: int = 0
    """Number of ranks of the generation; 0: the number of sources."""

    def source(self, rank: int) -> Source:
        """Return the first source of a rank."""
        return self.sources[rank][0]

    @property
    def stored(self) -> list[str]:
        """URLs of the durable tiers that ranks restore from."""
        every = (source for sources in self.sources.values() for source in sources)
        return sorted({source.url for source in every if source.url})

    @property
    def checkpoint(self) -> str:
        """Durable checkpoint that the first rank restores; empty: it restores from memory."""
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
    """Return the newest step available to every rank, with each rank's nearest source; None if there is none.

    Args:
        offers: all available states, without refused ones.
        nodes: node of each rank of the new generation.
        began: first step of each generation: later steps of earlier generations are abandoned.
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
    """Return the sources of every rank at one commit; None if a rank has none."""
    resized = world_size != len(nodes)
    live = {} if resized else {offer.rank: offer.save_id for offer in offers if offer.tier == "live"}
    sources: dict[int, tuple[Source, ...]] = {}
    sources |= {rank: (Source("self", rank, live[rank]),) for rank in nodes if rank in live}  # already in the process
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
        if len(found) == 1 and found[0][0].kind == "live":  # each source sends a part, at the same time
            sources[rank] = tuple(found[0][:_AT_ONCE])
        elif len(found) == 1 and found[0][0].kind == "parity":
            sources[rank] = tuple(found[0])
        else:
            sources[rank] = tuple(one[0] for one in found)
    return sources


class OfCommit(Protocol):
    """An object that belongs to one commit."""

    @property
    def step(self) -> int: ...

    @property
    def save_id(self) -> str: ...


def commit_of(one: OfCommit) -> tuple[int, int, str]:
    """Return the sort key of commits: the preferred commit is the largest."""
    return one.step, generation_of(one.save_id), one.save_id


def given_up_by(began: Mapping[int, int]) -> Callable[[OfCommit], bool]:
    """Return a function that tests whether a later generation began before a commit's step. Cached by commit."""

    @functools.cache
    def given_up(save_id: str, step: int) -> bool:
        generation = generation_of(save_id)
        return any(later > generation and first < step for later, first in began.items())

    return lambda one: given_up(one.save_id, one.step)


def began_on_disk(offers: Collection[Offer]) -> dict[int, int]:
    """Return the first step of each generation with a snapshot on a disk, which other nodes may not know."""
    began: dict[int, int] = {}
    for offer in offers:
        if offer.began >= 0:  # two runs may have used one number: the lower step abandons more
            generation = generation_of(offer.save_id)
            began[generation] = min(offer.began, began.get(generation, offer.began))
    return began


_Holders = frozenset[int] | None
"""Ranks that declare the same state; None: all of them."""


def _holders(offer: Offer) -> _Holders:
    sharing = Sharing.of(offer.sharing)
    return frozenset([offer.rank]) if sharing.kind == "shard" else sharing.ranks


def _differing(offers: Collection[Offer]) -> set[_Holders]:
    """Return the groups that declare the same state, but have two ranks with different states at one commit."""
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
    """Return the newest step above `after` that parity cannot rebuild, and a group's ranks with lost memory.

    Parity rebuilds one rank of a group; here two or more are lost. A rank that has overwritten its snapshot of the step
    does not count as lost.
    """
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


def start_fresh(nodes: Mapping[int, int], step: int = 0) -> Decision:
    """Return the decision to start every rank without state; `step` is the newest that the script itself has saved."""
    return Decision(step, {rank: (Source("fresh", rank),) for rank in nodes})


class _Equals:
    """Interchangeable offers of ranks that hold the same state."""

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
        """Return the candidates for the nearest offer: of the rank's node, of the rank itself, or next by number."""
        if len(self._offers) <= self._FEW:
            return self._offers
        near = [*self._by_node.get(node, ()), *self._by_rank.get(wanted, ())]
        for offers in self._by_tier.values():
            first = bisect_left(offers, rank, key=attrgetter("rank"))
            near += [*offers[first : first + _AT_ONCE], *offers[: max(0, first + _AT_ONCE - len(offers))]]
        return near


class _Commit:
    """Offers of one commit, by the rank they serve."""

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
        """Offers that serve every rank of the group that holds the same state."""
        self._serving_rank: dict[int, list[Offer]] = {}
        for holders, theirs in self.serving.items():
            for rank in holders or ():
                self._serving_rank.setdefault(rank, []).extend(theirs)
        self._made: dict[int | None, _Equals] = {}

    def _equals(self, rank: int | None) -> _Equals:
        """Return the offers that serve `rank`; None: all ranks. Built only for ranks that need a source."""
        if rank not in self._made:
            self._made[rank] = _Equals(self.serving[None] if rank is None else self._serving_rank.get(rank, ()))
        return self._made[rank]

    def nearest(self, rank: int, wanted: int, node: int, resized: bool) -> list[Source]:
        """Return the sources from which `rank` can get the state of rank `wanted`, the cheapest first.

        In order: memory of its node, a live peer, the node's disk, memory of another node, its disk, parity, a shared
        directory, S3. Among equals, the rank's own state comes first, and load is spread by rank.
        """
        own = [*self._own.get(wanted, ()), *self._everybody]
        others = self._equals(None if None in self.serving else wanted).near(rank, wanted, node)
        found: dict[Source, tuple[int, bool, bool, int]] = {}
        for offer in (*own, *others):
            if offer.tier == "live" and resized:
                continue  # a live rank sends only whole states, and only within its own world size
            source, place = _source(offer, rank, wanted, node, resized)
            cost = (place, offer.rank != wanted, offer.node != node, (offer.rank - rank) % 1_000_000)
            found[source] = min(cost, found.get(source, cost))
        ordered = sorted(found, key=found.__getitem__)
        if self._pieces and not resized and (not ordered or (ordered[0].kind == "durable" and ordered[0].node < 0)):
            ordered = self._rebuilt(wanted) or ordered
        return [source for source in ordered if source.kind == ordered[0].kind]

    def _rebuilt(self, lost: int) -> list[Source]:
        """Return the sources to rebuild a rank from: for each other rank of its stripe, the node with image and piece.

        Empty if a node is missing, for example after the loss of two nodes of a group.
        """
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
    """Return an offer as a source for `rank`, which needs the state of rank `wanted`, and the source's distance."""
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
    """Return whether one rank's state serves its group. `alike` states need two ranks, to show that they are equal."""
    kinds = {Sharing.of(offer.sharing).kind for offer in offers}
    return kinds == {"same"} or ("shard" not in kinds and len({offer.rank for offer in offers}) > 1)
