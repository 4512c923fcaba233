"""Which step a generation goes on from, and what is tried next when a rank cannot restore it. Pure.

Every rank that joins offers what it has live, and what its node's memory holds; durable tiers are asked when steps
would be lost without them, or nothing else is known. A source that a rank refuses is not tried again. Under our agent
the membership negotiates so (`membership.py`); elsewhere rank 0 does (`control_plane/decision.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from hyperpod_ext.runtime.ipc.control_messages import HeldCommit
from hyperpod_ext.runtime.ipc.gathered import HeldOffers
from hyperpod_ext.runtime.membership.actions import AskDurable, Fail
from hyperpod_ext.runtime.snapshot.parity import beyond_parity
from hyperpod_ext.runtime.snapshot.select import (
    Decision,
    Offer,
    OfferKey,
    began_on_disk,
    choose_step,
    commit_of,
    given_up_by,
    place_of,
    short_parity,
    start_fresh,
)


@dataclass(slots=True)
class RestoreNegotiation:
    """How one generation comes to its step."""

    durable: bool = False
    """Whether there are durable tiers: asked at the very start, and when memory has less than was committed."""
    outlives_run: bool = False
    """Whether memory outlives a run: what it holds may then be all that an earlier run has left."""
    starts_over: bool = False
    """Start from nothing if only some ranks' state is left."""
    step: int | None = None
    """The only step to restore; None: the newest."""
    joined: dict[int, Offer | None] = field(default_factory=dict)
    """Ranks that wait for the generation to begin, each with its live state, if that is complete."""
    decision: Decision | None = None
    attempt: int = 0
    """Number of the decision."""
    newest_generation: int = 0
    """Of earlier runs, on the disks of nodes: what is saved from now on is of a later one."""
    _disk_problems: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _restored: set[int] = field(default_factory=set)
    _held: dict[int, Collection[Offer]] = field(default_factory=dict)
    """What the memory of each node holds."""
    _stored: list[Offer] | None = None
    """Checkpoints in the durable tiers, once they have answered."""
    _problems: tuple[str, ...] = ()
    _unreachable: tuple[str, ...] = ()
    """What may be there and could not be asked: no reason to go on from less."""
    _excluded: frozenset[tuple[str, str]] = frozenset()
    """Durable checkpoints that were refused already when the durable tiers were last asked."""
    _refused: set[OfferKey] = field(default_factory=set)
    _last_error: str = ""
    """Why the decision could not be carried out, until there is another."""

    # --- what is offered ------------------------------------------------------------------------

    def join(self, rank: int, live: Offer | None) -> None:
        """`rank` waits for the generation to begin."""
        self.joined[rank] = live

    def hold(self, node: int, held: Collection[Offer]) -> None:
        """What the memory of `node` holds."""
        self._held[node] = held

    def look_at_disk(self, node: int, generation: int, problems: tuple[str, ...]) -> None:
        """The newest generation that the disks of `node` have seen, and what cannot be read there."""
        self.newest_generation = max(self.newest_generation, generation)
        self._disk_problems[node] = problems

    def forget_ranks(self, ranks: Collection[int]) -> None:
        """The processes of these ranks are gone."""
        for rank in ranks:
            self.joined.pop(rank, None)

    def forget_node(self, node: int) -> None:
        """The memory of `node` is gone."""
        self._held.pop(node, None)

    def awaits(self, excluded: Collection[tuple[str, str]]) -> bool:
        """Whether what durable tiers hold besides those is what this generation wants to know."""
        return self._excluded == frozenset(excluded)

    def durable_answered(
        self, stored: Collection[Offer], problems: tuple[str, ...], unreachable: tuple[str, ...]
    ) -> None:
        """Take the checkpoints in the durable tiers and the files that could not be read.

        `unreachable`: of the problems, those that do not tell whether anything is there.
        """
        refused = [offer for offer in self._stored or [] if (offer.url, offer.save_id) in self._excluded]
        self._stored, self._problems, self._unreachable = [*stored, *refused], problems, unreachable

    # --- what is decided ------------------------------------------------------------------------

    def decide(
        self, nodes: Mapping[int, int], began: Mapping[int, int], committed: int
    ) -> Decision | AskDurable | Fail:
        """The best that is left; or that the durable tiers must be asked first, or that there is nothing.

        Args:
            nodes: node of each rank.
            began: step at which each generation of this run went on.
            committed: newest step that some rank has reported as committed, of those that are not given up.
        """
        if self._is_unasked and self._stored is None and not began:
            return self._ask()
        decided = self._choose(nodes, began, committed)
        short = isinstance(decided, Fail) or decided.step < committed
        if self._is_unasked and short:
            return self._ask()
        if self._unreachable and (short or not began):
            return self._blind(decided)
        if isinstance(decided, Decision):
            self.attempt += 1
            self.decision, self._last_error, self._restored = decided, "", set()
        return decided

    def short_parity(self, began: Mapping[int, int]) -> tuple[int, tuple[int, ...]] | None:
        """Where the decided step is older than one that has parity, as too many of a group are lost: that step, and the
        ranks of the group whose snapshots are missing."""
        if not any(map(_has_parity, self._held.values())):
            return None  # and the snapshots of all need not be looked at
        after = self.decision.step if self.decision is not None else -1
        return short_parity([offer for held in self._held.values() for offer in held], began, after)

    def all_restored(self, rank: int) -> bool:
        """`rank` has restored and verified what was decided; whether every rank has."""
        assert self.decision is not None
        self._restored.add(rank)
        return len(self._restored) == len(self.decision.sources)

    @property
    def is_asking(self) -> bool:
        """Whether a decision was refused, and the durable tiers have yet to say what else there is."""
        return bool(self._last_error)

    def refuse(self, errors: Mapping[int, str], nodes: Mapping[int, int]) -> None:
        """These ranks could not restore what was decided for them."""
        assert self.decision is not None
        # a rank that loaded something for this attempt no longer holds the live state it came with
        for rank, sources in self.decision.sources.items():
            if sources[0].kind != "self":
                self.joined[rank] = None
        refused = {place_of(source, nodes) for rank in errors for source in self.decision.sources[rank]}
        rank, error = min(errors.items())
        self.refuse_offers(refused, f"rank {rank}: {error}")

    def refuse_offers(self, refused: Collection[OfferKey], error: str) -> None:
        """These offers could not be restored, with `error`."""
        self._refused |= set(refused)
        self._last_error = error

    @property
    def _is_unasked(self) -> bool:
        """Whether there is more to know from durable tiers: they name their newest few, and what they named may have
        been pruned since, as newer ones came."""
        return self.durable and (self._stored is None or bool(self._refused_durable() - self._excluded))

    def _refused_durable(self) -> frozenset[tuple[str, str]]:
        return frozenset((url, save_id) for _, rank, _, save_id, url in self._refused if rank < 0)

    def _ask(self) -> AskDurable:
        self._excluded = self._refused_durable()
        return AskDurable(tuple(sorted(self._excluded)))

    def _choose(self, nodes: Mapping[int, int], began: Mapping[int, int], committed: int) -> Decision | Fail:
        if (decided := self._from_equals(nodes, began)) is not None:
            return decided
        in_memory = [offer for offer in self.joined.values() if offer is not None]
        in_memory += [offer for held in self._held.values() for offer in held]
        offers = in_memory + (self._stored or [])
        allowed = [offer for offer in offers if offer.key not in self._refused and self.step in (None, offer.step)]
        on_disk = began_on_disk(in_memory)
        if (decided := choose_step(allowed, nodes, on_disk | {**began})) is not None:
            return decided
        kept = not self.starts_over and (on_disk or (self.outlives_run and in_memory))
        lost = committed or self._is_unasked or self._refused or self._problems or kept
        if not lost and self.step is None:
            return start_fresh(nodes)
        return self._nothing(offers, len(nodes), committed, short_parity(in_memory, began, -1))

    def _from_equals(self, nodes: Mapping[int, int], began: Mapping[int, int]) -> Decision | None:
        """The decision that all offers lead to, from few of them: where all ranks hold the same, and some of them live.

        Of what memory holds, only that of nodes whose ranks need a source can be nearer than a live rank. All that is
        held elsewhere is looked at by commit: whether it is newer, or shows that ranks differ. None: it takes them all.
        """
        live = [offer for offer in self.joined.values() if offer is not None]
        held = list(self._held.values())
        if self._refused or not live or any(not isinstance(one, HeldOffers) for one in held):
            return None
        commits = [commit for one in held if isinstance(one, HeldOffers) for commit in one.commits]
        if {"same"} != {one.sharing for one in live} | {commit.sharing for commit in commits}:
            return None
        decided = choose_step(live, nodes, began)
        if decided is None or _differ(live, commits, began):
            return None
        newest = max(commit_of(one) for one in live if one.step == decided.step)
        if any(commit_of(one) > newest for one in (*commits, *(self._stored or ()))):
            return None
        lacking = {nodes[rank] for rank, sources in decided.sources.items() if sources[0].kind != "self"}
        near = [offer for node in lacking for offer in self._held.get(node, ())]
        return choose_step([*live, *near], nodes, began) if near else decided

    def _nothing(
        self, offers: Collection[Offer], ranks: int, committed: int, short: tuple[int, tuple[int, ...]] | None
    ) -> Fail:
        seen = ", ".join(sorted({_seen(offer) for offer in offers})) or "nothing"
        wrong = [*self._problems, *(f"node {n}: {one}" for n, its in self._disk_problems.items() for one in its)]
        problems = f" Not readable: {'; '.join(wrong)}." if wrong else ""
        newest = f"the newest committed was {committed}" if committed else "none was committed in this run"
        last = f" The last try: {self._last_error}" if self._last_error else ""
        wanted = "step" if self.step is None else f"snapshot of step {self.step}"
        if short is not None:
            last = f" {beyond_parity(*short)}{last}"
        return Fail(
            "NoCheckpointError",
            f"No {wanted} that all {ranks} ranks can restore; {newest}. Seen: {seen}.{problems}{last}",
            "Look at the tiers with `hp-ext checkpoints list`; to start from nothing, give the job another name."
            if self.durable or self.outlives_run or any(offer.tier == "durable" for offer in offers)
            else "Start the job again; add a durable tier to checkpoint.tiers to survive this.",
        )

    def _blind(self, decided: Decision | Fail) -> Fail:
        """The job must not go on from what was decided: a tier that may have a newer step cannot be asked."""
        instead = "nothing" if isinstance(decided, Fail) or decided.step == 0 else f"step {decided.step}"
        return Fail(
            "UnreachableError",
            f"{'; '.join(self._unreachable)}. It may have a newer checkpoint than the others, which have {instead}.",
            "Start the job again when the tier can be read, or without it in checkpoint.tiers to go on from the rest.",
        )


def _has_parity(held: Collection[Offer]) -> bool:
    return bool(held.pieces) if isinstance(held, HeldOffers) else any(offer.tier == "parity" for offer in held)


def _differ(live: Collection[Offer], commits: Collection[HeldCommit], began: Mapping[int, int]) -> bool:
    """Whether states that should be the same were ever seen to differ."""
    digests: dict[str, set[str]] = {}
    contents: dict[str, set[str]] = {}
    for offer in live:
        digests.setdefault(offer.save_id, set()).add(offer.own_digest)
    given_up = given_up_by(began)
    for commit in commits:
        if not given_up(commit):
            digests.setdefault(commit.save_id, set()).update(commit.own_digests)
            contents.setdefault(commit.save_id, set()).update(content for content in commit.contents if content)
    return any(len(seen) > 1 for each in (digests, contents) for seen in each.values())


def _seen(offer: Offer) -> str:
    return f"{offer.name or offer.tier} step {offer.step}" + (f" (rank {offer.rank})" if offer.rank >= 0 else "")
