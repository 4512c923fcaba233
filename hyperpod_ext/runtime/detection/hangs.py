"""Who hangs: pure decisions over what the heartbeats of all ranks say.

In synchronous training one rank that hangs makes all the others wait for it in a collective, and from
outside they all look the same. They are not: whoever waits has come further than who is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hyperpod_ext.config.detection import HangPolicy
from hyperpod_ext.runtime.detection.heartbeat import IN_STEP, Phase, Reading

_REMEMBERED = 256
_SLOW = 0.95
"""Quantile of the step times that stands for a slow step: evaluations now and then are in it, one accident is not."""
_SILENT_S = 2.0
"""A process that gave no beat for so long, of four a second, has no Python lock or no processor."""
_LIVELY = 10.0
"""A rank that is behind but shows progress has so many times the limit: it may evaluate while others wait."""


@dataclass(slots=True)
class StepTimes:
    """What the steps of one job have taken so far, in seconds."""

    policy: HangPolicy
    usual: list[float] = field(default_factory=list)
    """The newest steps that were not the first of their generation."""
    first: list[float] = field(default_factory=list)
    """First steps of generations: they may compile, allocate, and open connections."""

    def add(self, seconds: float, *, first: bool) -> None:
        times = self.first if first else self.usual
        times.append(seconds)
        del times[:-_REMEMBERED]

    def limit_s(self, phase: Phase, *, first: bool) -> float:
        """Seconds without progress after which a rank in `phase` hangs. `first`: its generation's first step."""
        if phase not in IN_STEP or (first and not self.first) or not (self.usual or self.first):
            return self.policy.first_step_s
        slow = max(self.first) if first or not self.usual else quantile(self.usual, _SLOW)
        return max(self.policy.floor_s, self.policy.factor * slow)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What is known of one rank at one moment. Times are ages in seconds, so that they travel between machines."""

    rank: int
    generation: int
    step: int
    phase: Phase
    collectives: int
    quiet_s: float
    """Since its last sign of progress."""
    silent_s: float
    """Since its process last ran Python code."""
    stopped: bool = False
    """Whether the kernel has stopped the process: SIGSTOP, a debugger."""

    @classmethod
    def of(cls, rank: int, reading: Reading, *, quiet_since: float, stopped: bool, now: float) -> Heartbeat:
        return cls(
            rank=rank,
            generation=reading.generation,
            step=reading.step,
            phase=reading.phase,
            collectives=reading.collectives,
            quiet_s=max(0.0, now - quiet_since),
            silent_s=max(0.0, now - reading.beat_at) if reading.beat_at else 0.0,
            stopped=stopped,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Heartbeat:
        return cls(**{**fields, "phase": Phase(fields["phase"])})

    @property
    def position(self) -> tuple[int, int, int]:
        """How far it is: ranks that wait in a collective are further than those they wait for."""
        return (self.step, int(self.phase), self.collectives)

    @property
    def place(self) -> str:
        return f"in {self.phase.word} of step {self.step}"


@dataclass(frozen=True, slots=True)
class Hang:
    """Whose process is to be ended, and why; or, with no rank, why all must leave the generation."""

    ranks: tuple[int, ...]
    cause: str
    first: Heartbeat
    """Of the first rank that makes no progress."""


def silent_too_long(heartbeat: Heartbeat, policy: HangPolicy) -> str:
    """Why this rank is to be ended whatever the others do; empty: it is not."""
    if heartbeat.silent_s < policy.heartbeat_s:
        return ""
    what = "stopped by a signal" if heartbeat.stopped else "alive, but runs no Python code"
    return f"no heartbeat for {heartbeat.silent_s:.1f} s {heartbeat.place}: the process is {what}"


def find_hung(heartbeats: Mapping[int, Heartbeat], world_size: int, limit_s: float) -> Hang | None:
    """Who holds everybody up, when some rank has made no progress for `limit_s`. None: no one can say, or nobody does.

    `heartbeats`: of every rank, from the same moment or nearly so.
    """
    if len(heartbeats) < world_size or len({heartbeat.generation for heartbeat in heartbeats.values()}) != 1:
        return None  # some rank is away, and what ails it is known or will be
    quiet = {rank: heartbeat for rank, heartbeat in heartbeats.items() if heartbeat.quiet_s >= limit_s / 2}
    if not any(heartbeat.quiet_s >= limit_s for heartbeat in quiet.values()):
        return None
    frozen = [rank for rank, heartbeat in quiet.items() if heartbeat.stopped or heartbeat.silent_s > _SILENT_S]
    if frozen:  # it cannot wait for anyone; the others wait for it
        return Hang(tuple(sorted(frozen)), _why(heartbeats[frozen[0]]), heartbeats[frozen[0]])
    least = min(heartbeat.position for heartbeat in heartbeats.values())
    behind = sorted(rank for rank, heartbeat in heartbeats.items() if heartbeat.position == least)
    if 2 * len(behind) > world_size > 1:
        return _nobody(heartbeats, behind)
    hung = [rank for rank in behind if rank in quiet]
    if not hung and max(heartbeat.quiet_s for heartbeat in quiet.values()) >= _LIVELY * limit_s:
        hung = behind
    return Hang(tuple(hung), _why(heartbeats[hung[0]]) + _returned(heartbeats), heartbeats[hung[0]]) if hung else None


def _why(heartbeat: Heartbeat) -> str:
    if heartbeat.stopped:
        how = ": the process is stopped by a signal"
    elif heartbeat.silent_s > _SILENT_S:
        how = ": the process runs no Python code"
    else:
        how = ""
    return f"hung {heartbeat.place}, no progress for {heartbeat.quiet_s:.1f} s{how}"


def _nobody(heartbeats: Mapping[int, Heartbeat], behind: Sequence[int]) -> Hang:
    first, quiet_s = heartbeats[behind[0]], max(heartbeat.quiet_s for heartbeat in heartbeats.values())
    ranks = ", ".join(map(str, behind))
    cause = f"ranks {ranks} make no progress for {quiet_s:.1f} s {first.place}, and none is behind the others"
    return Hang((), cause + _returned(heartbeats), first)


def _returned(heartbeats: Mapping[int, Heartbeat]) -> str:
    """Who makes no more steps, and may be what the others wait for in vain."""
    done = [each for each in heartbeats.values() if each.phase is Phase.DONE]
    return "".join(
        f"; rank {each.rank} has returned from its training function in step {each.step}" for each in done[:1]
    )
