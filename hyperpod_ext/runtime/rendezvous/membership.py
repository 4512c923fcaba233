"""Who is in the job, in which generation, and what happens next. Pure: messages in, commands out.

    forming ──all joined──▶ restoring ──all restored──▶ running ──all done──▶ ended
       ▲                        │ a source failed: next best      │
       └──────── fault: the generation rises, everybody leaves ◀──┘

Every message carries the generation its sender believes in; older ones are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from hyperpod_ext.runtime.checkpoint.choose import Decision, Offer, Source, choose_step, start_fresh


class Phase(Enum):
    FORMING = "forming"
    RESTORING = "restoring"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a rank left the generation."""

    rank: int
    cause: str
    """`killed by SIGKILL (9)`, `ValueError: ...`: one line."""
    step: int
    """Step it was making."""
    died: bool
    """Whether its process is gone and needs a replacement."""
    final: bool = False
    """Whether trying again cannot help: a wrong configuration, a script that does not start."""
    code: str = "JobFailedError"
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Begin:
    """Open process groups of this generation, then restore."""

    generation: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class AskDurable:
    """Find out what the durable tiers hold, and tell `durable_answered`."""

    besides: tuple[tuple[str, str], ...] = ()
    """URL and save id of checkpoints that have been refused: what else is there?"""


@dataclass(frozen=True, slots=True)
class Restore:
    """The first choice could not be restored by all; here is the next."""

    attempt: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class Go:
    """Everybody has the state of this step: train."""

    step: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Leave the process groups, keep everything else, and join this generation."""

    generation: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class Replace:
    """Start a new process for this rank."""

    rank: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Everybody is done."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The job cannot go on."""

    code: str
    message: str
    hint: str = ""


Command = Begin | AskDurable | Restore | Go | Abort | Replace | Finish | Fail

_Place = tuple[str, int, int, str, str]
"""Tier, rank, node, save id and URL of an offer."""

_SAME_EXCEPTION = 2  # the same exception at the same step is the script's own; once may be bad luck
_SAME_DEATH = 3  # a process that dies at one step every time: out of memory, or a crash of its own


@dataclass(slots=True)
class Membership:
    """State machine of one job's membership."""

    nodes: Mapping[int, int]
    """Node of each rank."""
    max_restarts: int
    durable: bool = False
    """Whether there are durable tiers: asked at the very start, and when memory has nothing."""
    generation: int = 1
    phase: Phase = Phase.FORMING
    faults: list[Fault] = field(default_factory=list)
    committed: int = 0
    """Newest step that some rank has reported as committed, of those that are not given up."""
    joined: dict[int, Offer | None] = field(default_factory=dict)
    """Ranks waiting for the generation to begin, each with its live state, if that is whole."""
    restored: set[int] = field(default_factory=set)
    done: dict[int, str] = field(default_factory=dict)
    """Ranks that finished, with the digest of their final state."""
    decision: Decision | None = None
    attempt: int = 0
    began: dict[int, int] = field(default_factory=dict)
    """Step at which each generation of this run went on; those that never did are left out."""
    _held: dict[int, list[Offer]] = field(default_factory=dict)
    _stored: list[Offer] | None = None
    """What the durable tiers hold, once asked."""
    _problems: tuple[str, ...] = ()
    _asked_besides: frozenset[tuple[str, str]] = frozenset()
    """Durable checkpoints that were refused already when the durable tiers were last asked."""
    _unreachable: tuple[str, ...] = ()
    """What may be there and could not be asked: no reason to go on from less."""
    _refused: set[_Place] = field(default_factory=set)
    _last_try: str = ""
    """Why a decision could not be carried out, until there is another."""

    def join(self, rank: int, live: Offer | None, held: list[Offer]) -> list[Command]:
        """`rank` waits for a generation; `held` is what its node's memory server has."""
        if self.phase is not Phase.FORMING:
            return []
        self.joined[rank] = live
        self._held[self.nodes[rank]] = held
        if len(self.joined) < len(self.nodes):
            return []
        return self._begin()

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
        everybody = self.phase is Phase.FORMING and len(self.joined) == len(self.nodes)
        return self._begin() if everybody else []

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
        self._refused |= {self._place_of(source) for source in self.decision.sources[rank]}
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

    def step_committed(self, step: int) -> None:
        self.committed = max(self.committed, step)

    def fault(self, fault: Fault, generation: int) -> list[Command]:
        """A process died, or a rank's training function raised, in `generation`."""
        left_already = generation < self.generation
        if self.phase is Phase.ENDED or (left_already and not fault.died):
            return []  # what a rank met on its way out of an older generation is no news
        self.faults.append(fault)
        if failure := self._give_up(fault):
            return [self._end(failure)]
        if left_already or self.phase is Phase.FORMING:
            # nobody trains, so there is nothing to abort: the others go on waiting for this rank
            self.joined.pop(fault.rank, None)
            return [Replace(fault.rank)] if fault.died else []
        self.generation += 1
        self.phase, self.joined, self.restored, self.done = Phase.FORMING, {}, set(), {}
        self._held, self._refused, self._stored, self._last_try = {}, set(), None, ""
        self._problems, self._unreachable, self._asked_besides = (), (), frozenset()
        commands: list[Command] = [Abort(self.generation, fault)]
        return [*commands, Replace(fault.rank)] if fault.died else commands

    def finished(self, rank: int, generation: int, digest: str) -> list[Command]:
        """`rank` has returned from its training function."""
        if generation != self.generation or self.phase is not Phase.RUNNING:
            return []
        self.done[rank] = digest
        if len(self.done) < len(self.nodes):
            return []
        self.phase = Phase.ENDED
        return [Finish()]

    def _give_up(self, fault: Fault) -> Fail | None:
        who = f"rank {fault.rank} (node {self.nodes[fault.rank]}) at step {fault.step}: {fault.cause}"
        if fault.final:
            return Fail(fault.code, who, fault.hint)
        same = 0
        for earlier in reversed(self.faults):
            if (earlier.step, earlier.cause, earlier.died) != (fault.step, fault.cause, fault.died):
                break
            if fault.died and earlier.rank != fault.rank:
                break  # a whole node that goes down is several deaths, not one death several times
            same += 1
        if same >= (_SAME_DEATH if fault.died else _SAME_EXCEPTION):
            hint = "It happens each time, so restarting cannot help; the rank's log has the whole story."
            return Fail(fault.code, f"{who}; {same} times in a row", fault.hint or hint)
        if len(self.faults) > self.max_restarts:
            hint = "Raise restart.max_restarts, or find out why ranks fail; the logs of the ranks have their words."
            return Fail(
                fault.code, f"{who}; this was fault {len(self.faults)}, the job recovers from {self.max_restarts}", hint
            )
        return None

    def _decide(self) -> Decision | Fail:
        live = [offer for offer in self.joined.values() if offer is not None]
        offers = live + [offer for held in self._held.values() for offer in held] + (self._stored or [])
        allowed = [o for o in offers if (o.tier, o.rank, o.node, o.save_id, o.url) not in self._refused]
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

    def _place_of(self, source: Source) -> _Place:
        """The offer that a source came from."""
        match source.kind:
            case "memory" | "peer":
                return ("memory", source.rank, source.node, source.save_id, "")
            case "file" | "s3":
                return (source.kind, -1, -1, source.save_id, source.url)
            case _:
                return ("live", source.rank, self.nodes[source.rank], source.save_id, "")

    def _end(self, failure: Fail) -> Fail:
        self.phase = Phase.ENDED
        return failure


def _seen(offer: Offer) -> str:
    return f"{offer.tier} step {offer.step}" + (f" (rank {offer.rank})" if offer.rank >= 0 else "")
