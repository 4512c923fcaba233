"""From all ranks joined to all restored: which step the job goes on from, and what is tried next. Pure.

Whoever joins says what it has live, and what its node's memory holds; durable tiers are asked when steps would be lost
without them, or nothing else is known. A source that a rank refuses is not tried again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hyperpod_ext.runtime.membership.actions import AskDurable, Begin, Command, Fail, Go, Phase, Restore
from hyperpod_ext.runtime.snapshot.select import Decision, Offer, Place, choose_step, place_of, start_fresh


@dataclass(slots=True)
class Restoring:
    """What is known of one job's membership, and how a generation comes to its step."""

    nodes: Mapping[int, int]
    """Node of each rank; another one after that node was lost."""
    max_restarts: int
    durable: bool = False
    """Whether there are durable tiers: asked at the very start, and when memory has nothing."""
    generation: int = 1
    phase: Phase = Phase.FORMING
    committed: int = 0
    """Newest step that some rank has reported as committed, of those that are not given up."""
    joined: dict[int, Offer | None] = field(default_factory=dict)
    """Ranks waiting for the generation to begin, each with its live state, if that is whole."""
    restored: set[int] = field(default_factory=set)
    decision: Decision | None = None
    attempt: int = 0
    began: dict[int, int] = field(default_factory=dict)
    """Step at which each generation of this run went on; those that never did are left out."""
    _retiring: set[int] = field(default_factory=set)
    """Nodes that were given up and have not said yet what their memory holds."""
    _held: dict[int, list[Offer]] = field(default_factory=dict)
    _stored: list[Offer] | None = None
    """What the durable tiers hold, once asked."""
    _problems: tuple[str, ...] = ()
    _asked_besides: frozenset[tuple[str, str]] = frozenset()
    """Durable checkpoints that were refused already when the durable tiers were last asked."""
    _unreachable: tuple[str, ...] = ()
    """What may be there and could not be asked: no reason to go on from less."""
    _refused: set[Place] = field(default_factory=set)
    _last_try: str = ""
    """Why a decision could not be carried out, until there is another."""

    @property
    def _everybody(self) -> bool:
        """Whether all ranks wait for the generation, and all is known that can be restored."""
        return self.phase is Phase.FORMING and len(self.joined) == len(self.nodes) and not self._retiring

    def durable_answered(
        self, stored: list[Offer], generation: int, problems: tuple[str, ...], unreachable: tuple[str, ...] = ()
    ) -> list[Command]:
        """What the durable tiers hold, the newest generation they have seen, and what could not be read of them.

        `unreachable`: of the problems, those that do not tell whether anything is there.
        """
        if not self.began:
            self.generation = max(self.generation, generation + 1)  # writers of earlier runs are older than this one
        refused = [offer for offer in self._stored or [] if (offer.url, offer.save_id) in self._asked_besides]
        self._stored, self._problems, self._unreachable = [*stored, *refused], problems, unreachable
        if self.phase is Phase.RESTORING and self._last_try:
            return self._try_next()
        return self._begin() if self._everybody else []

    def _begin(self) -> list[Command]:
        if self._unasked and not self.began:
            return [self._ask()]
        decided = self._decide()
        if self._unasked and self._falls_short(decided):
            return [self._ask()]
        if failure := self._blind(decided):
            return [self._end(failure)]
        if isinstance(decided, Fail):
            return [self._end(decided)]
        self.phase, self.attempt, self.restored = Phase.RESTORING, 1, set()
        self.decision = decided
        return [Begin(self.generation, decided)]

    def restore_reported(self, rank: int, generation: int, attempt: int, error: str) -> list[Command]:
        """`rank` has restored and verified (empty `error`), or could not."""
        if generation != self.generation or attempt != self.attempt or self.phase is not Phase.RESTORING:
            return []
        assert self.decision is not None
        if not error:
            self.restored.add(rank)
            if len(self.restored) < len(self.nodes):
                return []
            self.phase = Phase.RUNNING
            self.began[self.generation] = self.decision.step  # not before: a try that failed gives up no steps
            self.committed = self.decision.step  # what was made after it is given up
            return [Go(self.decision.step)]
        # whoever loaded something for this try no longer holds the live state it came with
        for loaded, its in self.decision.sources.items():
            if its[0].kind != "self":
                self.joined[loaded] = None
        self._refused |= {place_of(source, self.nodes) for source in self.decision.sources[rank]}
        asking = bool(self._last_try)
        self._last_try = f"rank {rank}: {error}"
        return [] if asking else self._try_next()

    def _try_next(self) -> list[Command]:
        """The next best after what was refused; the durable tiers are asked once nothing else is left."""
        decided = self._decide()
        if self._unasked and self._falls_short(decided):
            return [self._ask()]
        if failure := self._blind(decided):
            return [self._end(failure)]
        if isinstance(decided, Fail):
            return [self._end(Fail(decided.code, f"{decided.message} The last try: {self._last_try}", decided.hint))]
        self.attempt += 1
        self.restored, self.decision, self._last_try = set(), decided, ""
        return [Restore(self.attempt, decided)]

    @property
    def _unasked(self) -> bool:
        """Whether there is more to know from durable tiers: they name their newest few, and what they named may have
        been pruned since, as newer ones came."""
        return self.durable and (self._stored is None or bool(self._refused_durable() - self._asked_besides))

    def _refused_durable(self) -> frozenset[tuple[str, str]]:
        return frozenset((url, save_id) for _, rank, _, save_id, url in self._refused if rank < 0)

    def _ask(self) -> AskDurable:
        self._asked_besides = self._refused_durable()
        return AskDurable(tuple(sorted(self._asked_besides)))

    def _falls_short(self, decided: Decision | Fail) -> bool:
        """Whether steps would be lost that a durable tier may have."""
        return isinstance(decided, Fail) or decided.step < self.committed

    def _blind(self, decided: Decision | Fail) -> Fail | None:
        """Why the job must not go on from what was decided: a tier that may have a newer step cannot be asked."""
        if not self._unreachable or (self.began and not self._falls_short(decided)):
            return None
        instead = "nothing" if isinstance(decided, Fail) or decided.step == 0 else f"step {decided.step}"
        return Fail(
            "UnreachableError",
            f"{'; '.join(self._unreachable)}. It may have a newer checkpoint than the others, which have {instead}.",
            "Start the job again when the tier can be read, or without it in checkpoint.tiers to go on from the rest.",
        )

    def _decide(self) -> Decision | Fail:
        live = [offer for offer in self.joined.values() if offer is not None]
        offers = live + [offer for held in self._held.values() for offer in held] + (self._stored or [])
        allowed = [o for o in offers if o.place not in self._refused]
        # where this generation begins is what is being decided, maybe not for the first time
        earlier = {generation: step for generation, step in self.began.items() if generation < self.generation}
        decided = choose_step(allowed, self.nodes, earlier)
        if decided is not None:
            return decided
        if self.committed == 0 and not self._unasked and not self._refused and not self._problems:
            return start_fresh(self.nodes)
        seen = ", ".join(sorted({_seen(offer) for offer in offers})) or "nothing"
        problems = f" Not readable: {'; '.join(self._problems)}." if self._problems else ""
        newest = f"the newest committed was {self.committed}" if self.committed else "none was committed in this run"
        return Fail(
            "NoCheckpointError",
            f"No step that all {len(self.nodes)} ranks can restore; {newest}. Seen: {seen}.{problems}",
            "Look at the tiers with `hp-ext checkpoints list`; to start from nothing, give the job another name."
            if self.durable
            else "Start the job again; add a durable tier to checkpoint.tiers to survive this.",
        )

    def _end(self, failure: Fail) -> Fail:
        self.phase = Phase.ENDED
        return failure


def _seen(offer: Offer) -> str:
    return f"{offer.tier} step {offer.step}" + (f" (rank {offer.rank})" if offer.rank >= 0 else "")
