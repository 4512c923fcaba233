"""Choose the step that all ranks restore, and the source of each rank's state. Pure functions.

The coordinator chooses the step for all ranks. If each rank chose the newest step for itself, ranks could choose
different steps, and would continue training without an error.
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
"""Tier, rank, node, save ID and URL of an offer, by which refused offers are recognized."""

_AT_ONCE = 4
"""Maximum number of live ranks that send parts of a state to one joining worker at the same time."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A state of `step` that a process, a memory server or a durable tier offers for a restore."""

    tier: OfferTier
    """`live`: the state is in the process of a rank that trains. `memory`: the state is in a node's memory server, as
    original or replica. `parity`: a parity piece (XOR of parts of other ranks' snapshots), useful only with other
    snapshots. `durable`: the state is in a committed checkpoint of all ranks, or in one rank's snapshot on the disk of
    `node`."""
    step: int
    rank: int
    """Rank that saved the state; for a parity piece, the rank on whose node it is; -1 for a checkpoint of all ranks."""
    node: int
    """Node that has the state in memory or on its disk; -1 for a checkpoint of all ranks."""
    save_id: str
    """Save ID of the commit (the finished step): its generation and step."""
    own_digest: str = ""
    """Digest of the part of the state that may differ between ranks; empty if unknown."""
    sharing: str = "same"
    """A word that states which ranks hold the same state, such as `same`, `alike:0,2` or `shard` (see `sharing.py`)."""
    content: str = ""
    """Digest of the whole state; empty if unknown."""
    world_size: int = 0
    """Number of ranks that saved this commit; 0: the present number of ranks."""
    url: str = ""
    folder: str = ""
    """URL of the durable tier, and folder of the checkpoint in it."""
    name: str = ""
    """Kind of the durable tier, such as `s3`."""
    began: int = -1
    """First step of the generation that saved a snapshot on a node's disk; -1 if the state is not on a disk. All steps
    of earlier generations that are later than this step are abandoned, that is, never restored."""
    stripe: tuple[int, ...] = ()
    """Ranks of the parity group to which a parity piece belongs."""

    @property
    def key(self) -> OfferKey:
        return (self.tier, self.rank, self.node, self.save_id, self.url if self.node < 0 else "")

    @classmethod
    def of_memory(cls, summary: Mapping[str, Any], node: int) -> Offer:
        """Return the offer for a snapshot in a node's memory server."""
        return cls("memory", node=node, **{key: summary[key] for key in _OF_MEMORY})

    @classmethod
    def of_disk(cls, summary: Mapping[str, Any], node: int, run: str) -> Offer:
        """Return the offer for a snapshot on a node's disk.

        Args:
            summary: the memory server's description of the snapshot.
            node: the node.
            run: the present run of the job. If the snapshot is of another run, the save ID gets that run as a suffix.
        """
        given = {key: summary[key] for key in (*_OF_MEMORY, "url", "folder", "began")}
        given["save_id"] = save_id_in(summary["save_id"], summary["run"] if summary["run"] != run else "")
        return cls("durable", node=node, name=summary["tier"], **given)

    @classmethod
    def of_piece(cls, summary: Mapping[str, Any], node: int) -> Offer:
        """Return the offer for a parity piece in a node's memory server."""
        given = {key: summary[key] for key in ("step", "rank", "save_id", "world_size")}
        return cls("parity", node=node, sharing="shard", stripe=tuple(summary["stripe"]), **given)

    @classmethod
    def of_all(cls, summary: Mapping[str, Any]) -> Offer:
        """Return the offer for a checkpoint of all ranks in a durable tier."""
        given = {key: summary[key] for key in _OF_ALL}
        return cls("durable", rank=-1, node=-1, name=summary["tier"], **given)


_OF_MEMORY = ("step", "rank", "save_id", "own_digest", "sharing", "content", "world_size")
_OF_ALL = ("step", "save_id", "world_size", "url", "folder")


@dataclass(frozen=True, slots=True)
class Source:
    """A place from which one rank gets its state, or a part of it."""

    kind: Literal["self", "live", "memory", "peer", "parity", "durable", "fresh"]
    """`self`: the rank's own process, which already holds the state. `live`: another rank's process. `memory` and
    `peer`: memory server of the same node, or of another node. `parity`: the snapshot of `rank` and a parity piece,
    both on `node`; a lost snapshot is rebuilt from one such source per remaining rank of the group. `durable`: a
    durable tier. `fresh`: start without state."""
    rank: int
    """Rank whose state the source has."""
    save_id: str = ""
    node: int = -1
    """Node whose memory or disk has the state; -1 if the state is not on a certain node."""
    url: str = ""
    folder: str = ""
    """URL of the durable tier, and the checkpoint's folder in it. `url` and `folder` are empty if the state is on the
    disk of another node, because the disk is read through that node's memory server."""
    tier: str = ""
    """Kind of the durable tier, such as `s3`; empty for other sources."""

    @property
    def on_another_disk(self) -> bool:
        """Whether the state is on another node's disk, and is read through that node's memory server."""
        return self.kind == "durable" and self.node >= 0 and not self.url

    @property
    def name(self) -> str:
        """Name for messages: the kind of the durable tier; for other sources, the source's kind."""
        return self.tier or self.kind


def place_of(source: Source, nodes: Mapping[int, int]) -> OfferKey:
    """Return the key of the offer from which a source was made.

    Args:
        source: the source.
        nodes: the node of each rank.
    """
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
    """The step that all ranks of a generation restore, and the sources of their states."""

    step: int
    sources: dict[int, tuple[Source, ...]]
    """The restore sources of each rank, by rank. A rank usually has one source. A rank has several sources if live
    ranks each send a part of the state, or if its state is rebuilt from parity. After a change of the world size, a
    rank has one source for each rank that saved the commit. A rank receives only the sources that it needs."""
    world_size: int = 0
    """Number of ranks of the generation; 0: as many as `sources` has entries."""

    def source(self, rank: int) -> Source:
        """Return the first source of a rank."""
        return self.sources[rank][0]

    @property
    def stored(self) -> list[str]:
        """URLs of the durable tiers from which ranks restore."""
        every = (source for sources in self.sources.values() for source in sources)
        return sorted({source.url for source in every if source.url})

    @property
    def checkpoint(self) -> str:
        """Place of the durable checkpoint from which the first rank restores; empty for a restore from memory."""
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
    """Return the newest step that every rank can restore, with the nearest source for each rank; None if there is none.

    Args:
        offers: all offers that no rank has refused.
        nodes: node of each rank of the new generation.
        began: first step of each generation. Steps of earlier generations that are later than this step are abandoned,
            and not chosen.
    """
    given_up = given_up_by(began or {})
    alive = [offer for offer in offers if not given_up(offer)]
    differing = _differing(alive)
    # group by commit, because snapshots of the same step may be from different generations
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
    """Return the sources of every rank for one commit; None if a rank has no source.

    Args:
        offers: the offers of the commit.
        nodes: node of each rank of the new generation.
        world_size: number of ranks that saved the commit.
        differing: groups of ranks that declare the same state, although their states differ.
    """
    resized = world_size != len(nodes)
    live = {} if resized else {offer.rank: offer.save_id for offer in offers if offer.tier == "live"}
    sources: dict[int, tuple[Source, ...]] = {}
    # a rank whose process holds the state keeps it
    sources |= {rank: (Source("self", rank, live[rank]),) for rank in nodes if rank in live}
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
        if len(found) == 1 and found[0][0].kind == "live":  # several live ranks send parts at the same time
            sources[rank] = tuple(found[0][:_AT_ONCE])
        elif len(found) == 1 and found[0][0].kind == "parity":
            sources[rank] = tuple(found[0])
        else:
            sources[rank] = tuple(one[0] for one in found)
    return sources


class OfCommit(Protocol):
    """An object that belongs to one commit (a finished step in one generation)."""

    @property
    def step(self) -> int: ...

    @property
    def save_id(self) -> str: ...


def commit_of(one: OfCommit) -> tuple[int, int, str]:
    """Return the key by which commits are sorted. The commit with the largest key is preferred for a restore."""
    return one.step, generation_of(one.save_id), one.save_id


def given_up_by(began: Mapping[int, int]) -> Callable[[OfCommit], bool]:
    """Return a function that tests whether a commit is abandoned, because a later generation began before its step.

    Args:
        began: first step of each generation.
    """

    @functools.cache
    def given_up(save_id: str, step: int) -> bool:
        generation = generation_of(save_id)
        return any(later > generation and first < step for later, first in began.items())

    return lambda one: given_up(one.save_id, one.step)


def began_on_disk(offers: Collection[Offer]) -> dict[int, int]:
    """Return the first step of each generation that has a snapshot on a node's disk.

    Disks may have snapshots of generations that the coordinator does not know, for example of earlier runs.
    """
    began: dict[int, int] = {}
    for offer in offers:
        if offer.began >= 0:  # of two runs with this generation, the lower first step counts
            generation = generation_of(offer.save_id)
            began[generation] = min(offer.began, began.get(generation, offer.began))
    return began


_Holders = frozenset[int] | None
"""Ranks that declare to hold the same state; None: all ranks."""


def _holders(offer: Offer) -> _Holders:
    sharing = Sharing.of(offer.sharing)
    return frozenset([offer.rank]) if sharing.kind == "shard" else sharing.ranks


def _differing(offers: Collection[Offer]) -> set[_Holders]:
    """Return the groups of ranks that declare to hold the same state, but have different states of a commit."""
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
    """Return the newest step after `after` that parity cannot rebuild, and the ranks whose snapshots of it are lost.

    Parity can rebuild the snapshot of one rank of a group, but not two or more lost snapshots of the same group. A
    snapshot does not count as lost if its rank has overwritten it by a newer snapshot. The result is None if parity can
    rebuild all steps after `after`.

    Args:
        offers: all offers.
        began: first step of each generation, which shows the abandoned steps; an abandoned step is not returned.
        after: only later steps are returned.
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
    """Return the decision to start every rank without state.

    Args:
        nodes: node of each rank.
        step: the newest step that the script itself has saved; 0: none.
    """
    return Decision(step, {rank: (Source("fresh", rank),) for rank in nodes})


class _Equals:
    """Offers of ranks that hold the same state, so that a rank can use any of these offers."""

    _FEW = 64
    """Maximum number of offers that are all compared; of more offers, only a few near ones are compared (see
    `near`)."""

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
        """Return a few offers that include the nearest offer for a rank.

        The result has the offers on the rank's node, the offers of the wanted rank itself, and, in each tier, the
        offers of the next higher ranks.

        Args:
            rank: rank that needs a state.
            wanted: rank whose state it needs.
            node: node of `rank`.
        """
        if len(self._offers) <= self._FEW:
            return self._offers
        near = [*self._by_node.get(node, ()), *self._by_rank.get(wanted, ())]
        for offers in self._by_tier.values():
            first = bisect_left(offers, rank, key=attrgetter("rank"))
            near += [*offers[first : first + _AT_ONCE], *offers[: max(0, first + _AT_ONCE - len(offers))]]
        return near


class _Commit:
    """The copies of one committed step that nodes offer. The source of each rank's restore is chosen from these
    copies."""

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
        """The offers from which all ranks of a group can restore, by group (ranks that hold the same state)."""
        self._serving_rank: dict[int, list[Offer]] = {}
        for holders, theirs in self.serving.items():
            for rank in holders or ():
                self._serving_rank.setdefault(rank, []).extend(theirs)
        self._made: dict[int | None, _Equals] = {}

    def _equals(self, rank: int | None) -> _Equals:
        """Return the offers from which `rank` can restore; if `rank` is None, the offers from which every rank can
        restore.

        The result is computed at the first call for a rank, because many ranks never need a source.
        """
        if rank not in self._made:
            self._made[rank] = _Equals(self.serving[None] if rank is None else self._serving_rank.get(rank, ()))
        return self._made[rank]

    def nearest(self, rank: int, wanted: int, node: int, resized: bool) -> list[Source]:
        """Return the sources from which `rank` can get the state of rank `wanted`, all of the cheapest kind.

        The order of kinds is: memory of the rank's node, a live rank, disk of the rank's node, memory of another node,
        disk of another node, parity, a shared directory, S3. Among sources of one kind, the state of rank `wanted`
        itself comes first. States of other ranks are sorted so that different ranks restore from different sources.

        Args:
            rank: rank that needs a state.
            wanted: rank whose state it needs.
            node: node of `rank`.
            resized: whether the world size has changed since the commit.
        """
        own = [*self._own.get(wanted, ()), *self._everybody]
        others = self._equals(None if None in self.serving else wanted).near(rank, wanted, node)
        found: dict[Source, tuple[int, bool, bool, int]] = {}
        for offer in (*own, *others):
            if offer.tier == "live" and resized:
                continue  # a live rank sends its state only if the world size is unchanged
            source, place = _source(offer, rank, wanted, node, resized)
            cost = (place, offer.rank != wanted, offer.node != node, (offer.rank - rank) % 1_000_000)
            found[source] = min(cost, found.get(source, cost))
        ordered = sorted(found, key=found.__getitem__)
        if self._pieces and not resized and (not ordered or (ordered[0].kind == "durable" and ordered[0].node < 0)):
            ordered = self._rebuilt(wanted) or ordered
        return [source for source in ordered if source.kind == ordered[0].kind]

    def _rebuilt(self, lost: int) -> list[Source]:
        """Return the sources from which parity can rebuild the snapshot of rank `lost`.

        For each other rank of the parity group, the source is a node that has both the rank's snapshot and its parity
        piece. The result is empty if another rank's snapshot or piece is lost too, for example after the loss of two
        nodes of the group.
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
    """Return an offer as a source, with the source's distance. A source with a smaller distance is faster to read.

    Args:
        offer: the offer.
        rank: rank that needs a state.
        wanted: rank whose state it needs.
        node: node of `rank`.
        resized: whether the world size has changed since the commit.
    """
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
    """Return whether every rank of a group can restore from each of these offers of the group.

    If the group's states are `alike`, offers of at least two ranks are needed, to show that the states are equal.
    """
    kinds = {Sharing.of(offer.sharing).kind for offer in offers}
    return kinds == {"same"} or ("shard" not in kinds and len({offer.rank for offer in offers}) > 1)
