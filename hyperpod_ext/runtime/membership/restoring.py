"""Chooses the step that a generation restores, and chooses again if a rank cannot restore the chosen step. Pure
functions.

Every rank that joins a generation reports offers, from which state can be restored: the live state in the rank's
process, and the snapshots in its node's memory. The checkpoints in durable tiers are listed only if steps would be lost
without them, or if no rank has an offer. An offer that a rank could not restore is not used again. In jobs with agents,
`membership.py` uses this module. In jobs without agents, rank 0 uses this module in `control_plane/decision.py`.
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
    """Collects the offers of one generation, and chooses the step to restore, with sources for each rank."""

    durable: bool = False
    """Whether the job has durable tiers. The checkpoints in durable tiers are listed at the first start of a run, and
    whenever the newest committed step is not in memory."""
    outlives_run: bool = False
    """Whether snapshots in memory are kept after a run has ended, and may be the only state of an earlier run."""
    script_saves: bool = False
    """Whether the script saves and loads its own state, so that the runtime has no state to restore."""
    starts_over: bool = False
    """Whether to start at step 0 if only some ranks have state from an earlier run."""
    step: int | None = None
    """The step that the user wants to restore; None to restore the newest step."""
    joined: dict[int, Offer | None] = field(default_factory=dict)
    """For each rank that waits for the begin of the generation, the `Offer` that describes the state in the rank's
    process; None if the process has no complete state."""
    decision: Decision | None = None
    attempt: int = 0
    """Number of decisions made in this generation so far."""
    newest_generation: int = 0
    """Newest generation of earlier runs on the nodes' disks. The generations of this run must have higher numbers."""
    _disk_problems: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """For each node, one sentence for each unreadable file on the node's disks."""
    _restored: set[int] = field(default_factory=set)
    """Ranks that have restored their state according to the current decision."""
    _held: dict[int, Collection[Offer]] = field(default_factory=dict)
    """For each node, the offers of snapshots in the node's memory."""
    _stored: list[Offer] | None = None
    """Checkpoints in the durable tiers; None until the tiers have been listed."""
    _problems: tuple[str, ...] = ()
    """One sentence for each file in a durable tier that could not be read."""
    _unreachable: tuple[str, ...] = ()
    """One sentence for each durable tier that could not be listed, and so may have a newer checkpoint."""
    _excluded: frozenset[tuple[str, str]] = frozenset()
    """URL and save id of each checkpoint that was left out when the durable tiers were last listed, because a rank
    could not restore it."""
    _refused: set[OfferKey] = field(default_factory=set)
    """Keys of the offers that a rank could not restore."""
    _last_error: str = ""
    """Why a rank could not restore the last decision; empty once there is a new decision."""

    # --- offers ---------------------------------------------------------------------------------

    def join(self, rank: int, live: Offer | None) -> None:
        """Record that `rank` is ready to start the generation.

        Args:
            rank: the rank.
            live: the `Offer` that describes the state in the rank's process; None if the process has no complete state.
        """
        self.joined[rank] = live

    def hold(self, node: int, held: Collection[Offer]) -> None:
        """Record the offers of the snapshots in the memory of `node`."""
        self._held[node] = held

    def look_at_disk(self, node: int, generation: int, problems: tuple[str, ...]) -> None:
        """Record the newest generation on the disks of `node`, and one sentence for each unreadable file."""
        self.newest_generation = max(self.newest_generation, generation)
        self._disk_problems[node] = problems

    def forget_ranks(self, ranks: Collection[int]) -> None:
        """Remove `ranks` from the ranks that have joined, because their processes have ended."""
        for rank in ranks:
            self.joined.pop(rank, None)

    def forget_node(self, node: int) -> None:
        """Remove the offers of `node`, because the node and the snapshots in its memory are lost."""
        self._held.pop(node, None)

    def awaits(self, excluded: Collection[tuple[str, str]]) -> bool:
        """Return whether this generation has requested the list of durable checkpoints that leaves out exactly
        `excluded`."""
        return self._excluded == frozenset(excluded)

    def durable_answered(
        self, stored: Collection[Offer], problems: tuple[str, ...], unreachable: tuple[str, ...]
    ) -> None:
        """Record which checkpoints are in the durable tiers.

        Args:
            stored: checkpoints that were found in the durable tiers.
            problems: one sentence for each file or tier that could not be read.
            unreachable: one sentence for each tier that could not be listed, and so may hold more checkpoints.
        """
        refused = [offer for offer in self._stored or [] if (offer.url, offer.save_id) in self._excluded]
        self._stored, self._problems, self._unreachable = [*stored, *refused], problems, unreachable

    # --- decisions ------------------------------------------------------------------------------

    def decide(
        self, nodes: Mapping[int, int], began: Mapping[int, int], committed: int
    ) -> Decision | AskDurable | Fail:
        """Choose the step to restore, and a source for each rank.

        Args:
            nodes: node of each rank.
            began: step from which each generation of this run continued.
            committed: newest step that any rank has committed. Steps that were rolled back do not count.

        Returns:
            The decision; `AskDurable` if the durable tiers must be listed first; `Fail` if no step can be restored.
        """
        if self._is_unasked and self._stored is None and not began:
            return self._ask()
        fresh = start_fresh(nodes, committed)
        decided = fresh if self.script_saves else self._choose(nodes, began, committed)
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
        """Return the newest step that cannot be rebuilt from parity, because too many nodes of a parity group are lost,
        and the ranks whose snapshots are missing. Returns None if no step after the decided step is lost for this
        reason."""
        if not any(map(_has_parity, self._held.values())):
            return None  # without parity, skip the search through all snapshots
        after = self.decision.step if self.decision is not None else -1
        return short_parity([offer for held in self._held.values() for offer in held], began, after)

    def all_restored(self, rank: int) -> bool:
        """Record that `rank` has restored and verified its state. Returns whether every rank has restored its state."""
        assert self.decision is not None
        self._restored.add(rank)
        return len(self._restored) == len(self.decision.sources)

    @property
    def is_asking(self) -> bool:
        """Whether a rank could not restore the decision, and the next decision waits for the list of durable
        checkpoints."""
        return bool(self._last_error)

    def refuse(self, errors: Mapping[int, str], nodes: Mapping[int, int]) -> None:
        """Exclude the sources of failed restores from later decisions. `errors`: error of each rank that failed."""
        assert self.decision is not None
        # a rank that has loaded state from elsewhere in this attempt no longer has its live state
        for rank, sources in self.decision.sources.items():
            if sources[0].kind != "self":
                self.joined[rank] = None
        refused = {place_of(source, nodes) for rank in errors for source in self.decision.sources[rank]}
        rank, error = min(errors.items())
        self.refuse_offers(refused, f"rank {rank}: {error}")

    def refuse_offers(self, refused: Collection[OfferKey], error: str) -> None:
        """Exclude refused offers, which ranks could not restore, from later decisions. `error`: the lowest failed rank
        and its error."""
        self._refused |= set(refused)
        self._last_error = error

    @property
    def _is_unasked(self) -> bool:
        """Whether the durable tiers must be listed before the next decision, because there is no list yet, or because a
        listed checkpoint could not be restored. A list contains only the newest checkpoints, so a new list without the
        refused checkpoints may contain older checkpoints."""
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
        """Decide from a few offers only, to save time. Returns None if the states of ranks differ, or if no rank has
        the state in its process.

        The decision is the same as a decision from all offers. A snapshot in memory is a better source than another
        rank's live state only for ranks on the same node, so snapshots are searched only on nodes with a rank without
        live state. On other nodes, the summary of each commit (`HeldCommit`) shows whether a snapshot is newer, and
        whether the states of ranks differ.
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
        wrong = [*self._problems, *(f"node {n}: {each}" for n, found in self._disk_problems.items() for each in found)]
        problems = f" Not readable: {'; '.join(wrong)}." if wrong else ""
        newest = f"the newest committed was {committed}" if committed else "none was committed in this run"
        last = f" Error of the last attempt: {self._last_error}" if self._last_error else ""
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
        """Return the `Fail` action for a job that must not continue from `decided`, because a tier that could not be
        listed may have a newer step than `decided`."""
        instead = "nothing" if isinstance(decided, Fail) or decided.step == 0 else f"step {decided.step}"
        return Fail(
            "UnreachableError",
            f"{'; '.join(self._unreachable)}. An unreachable tier may have a newer checkpoint than the other tiers, "
            f"which have {instead}.",
            "Start the job again when the tier can be read. To continue from the other tiers, remove this tier from "
            "checkpoint.tiers.",
        )


def _has_parity(held: Collection[Offer]) -> bool:
    return bool(held.pieces) if isinstance(held, HeldOffers) else any(offer.tier == "parity" for offer in held)


def _differ(live: Collection[Offer], commits: Collection[HeldCommit], began: Mapping[int, int]) -> bool:
    """Return whether two ranks have different states in the same save, although all ranks should have equal states."""
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
