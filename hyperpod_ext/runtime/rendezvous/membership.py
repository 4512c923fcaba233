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

from hyperpod_ext.runtime.checkpoint.choose import Decision, Offer, choose_step, start_fresh


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


Command = Begin | Restore | Go | Abort | Replace | Finish | Fail

_SAME_EXCEPTION = 2  # the same exception at the same step is the script's own; once may be bad luck
_SAME_DEATH = 3  # a process that dies at one step every time: out of memory, or a crash of its own


@dataclass(slots=True)
class Membership:
    """State machine of one job's membership."""

    nodes: Mapping[int, int]
    """Node of each rank."""
    max_restarts: int
    generation: int = 1
    phase: Phase = Phase.FORMING
    faults: list[Fault] = field(default_factory=list)
    committed: int = 0
    """Newest step that some rank has reported as committed."""
    joined: dict[int, Offer | None] = field(default_factory=dict)
    """Ranks waiting for the generation to begin, each with its live state, if that is whole."""
    restored: set[int] = field(default_factory=set)
    done: dict[int, str] = field(default_factory=dict)
    """Ranks that finished, with the digest of their final state."""
    decision: Decision | None = None
    attempt: int = 0
    _held: dict[int, list[Offer]] = field(default_factory=dict)
    _refused: set[tuple[str, int, str, int]] = field(default_factory=set)

    def join(self, rank: int, live: Offer | None, held: list[Offer]) -> list[Command]:
        """`rank` waits for a generation; `held` is what its node's memory server has."""
        if self.phase is not Phase.FORMING:
            return []
        self.joined[rank] = live
        self._held[self.nodes[rank]] = held
        if len(self.joined) < len(self.nodes):
            return []
        decided = self._decide()
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
            return [Go(self.decision.step)]
        source = self.decision.sources[rank]
        # whoever loaded something for this try no longer holds the live state it came with
        for loaded, its in self.decision.sources.items():
            if its.kind != "self":
                self.joined[loaded] = None
        tier = "memory" if source.kind == "memory" else "live"
        self._refused.add((tier, source.rank, source.save_id, self.decision.step))
        decided = self._decide()
        if isinstance(decided, Fail):
            return [
                self._end(Fail(decided.code, f"{decided.message} The last try: rank {rank}: {error}", decided.hint))
            ]
        self.attempt += 1
        self.restored, self.decision = set(), decided
        return [Restore(self.attempt, decided)]

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
        self._held, self._refused = {}, set()
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
        offers = live + [offer for held in self._held.values() for offer in held]
        allowed = [o for o in offers if (o.tier, o.rank, o.save_id, o.step) not in self._refused]
        decided = choose_step(allowed, self.nodes)
        if decided is not None:
            return decided
        if self.committed == 0 and not self._refused:
            return start_fresh(self.nodes)
        seen = ", ".join(sorted({f"{o.tier} step {o.step} (rank {o.rank})" for o in offers})) or "nothing"
        return Fail(
            "NoCheckpointError",
            f"No step that all {len(self.nodes)} ranks can restore; the newest committed was {self.committed}. "
            f"Seen: {seen}.",
            "Start the job again; add a durable tier to checkpoint.tiers to survive this.",
        )

    def _end(self, failure: Fail) -> Fail:
        self.phase = Phase.ENDED
        return failure
