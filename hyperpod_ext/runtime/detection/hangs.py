"""Finds the hung rank from the heartbeats of all ranks. Pure functions.

In synchronous training, one hung rank makes all other ranks wait in a collective. Seen from outside, a hung rank looks
like the waiting ranks, but the waiting ranks have made more progress.
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
"""Quantile of the step times that counts as a slow step. The quantile is high enough to include steps with an
evaluation, but not a single outlier."""
_SILENT_S = 2.0
"""Time in seconds without a heartbeat after which a process seems to have no GIL or no processor. A healthy process has
about four heartbeats per second."""
_LIVELY = 10.0
"""Factor by which the time limit is longer for a rank that is behind other ranks but makes progress, for example
because it evaluates the model."""


@dataclass(slots=True)
class StepTimes:
    """Durations of a job's steps so far, in seconds, and the time limits that follow from them."""

    policy: HangPolicy
    usual: list[float] = field(default_factory=list)
    """Durations of the newest steps, without the first step of each generation."""
    first: list[float] = field(default_factory=list)
    """Durations of first steps of generations. A first step may compile, allocate memory, and open connections."""

    def add(self, seconds: float, *, first: bool) -> None:
        times = self.first if first else self.usual
        times.append(seconds)
        del times[:-_REMEMBERED]

    def limit_s(self, phase: Phase, *, first: bool) -> float:
        """Return the time in seconds without progress that means a hang in `phase`.

        `first`: whether the rank makes the first step of its generation."""
        if phase not in IN_STEP or (first and not self.first) or not (self.usual or self.first):
            return self.policy.first_step_s
        slow = max(self.first) if first or not self.usual else quantile(self.usual, _SLOW)
        return max(self.policy.floor_s, self.policy.factor * slow)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile `share` of `values`: the smallest value such that at least this share of `values` is not
    larger."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """State of one rank at one moment. Times are ages in seconds, so that other machines can compare them."""

    rank: int
    generation: int
    step: int
    phase: Phase
    collectives: int
    quiet_s: float
    """Time in seconds since the rank's last progress."""
    silent_s: float
    """Time in seconds since the process last ran Python code."""
    stopped: bool = False
    """Whether the kernel has stopped the process, for example by SIGSTOP or a debugger."""

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
        """Sort key for progress: larger for a rank that waits in a collective than for the rank it waits for."""
        return (self.step, int(self.phase), self.collectives)

    @property
    def place(self) -> str:
        return f"in {self.phase.word} of step {self.step}"


@dataclass(frozen=True, slots=True)
class Hang:
    """A hang: the ranks to kill, and the reason. If `ranks` is empty, no process is killed, but all ranks must leave
    the generation."""

    ranks: tuple[int, ...]
    cause: str
    first: Heartbeat
    """Heartbeat of the first rank that makes no progress."""


def silent_too_long(heartbeat: Heartbeat, policy: HangPolicy) -> str:
    """Return why this rank must be killed independently of the other ranks; empty if it need not be killed."""
    if heartbeat.silent_s < policy.heartbeat_s:
        return ""
    what = "stopped by a signal" if heartbeat.stopped else "alive, but runs no Python code"
    return f"no heartbeat for {heartbeat.silent_s:.1f} s {heartbeat.place}: the process is {what}"


def find_hung(heartbeats: Mapping[int, Heartbeat], world_size: int, limit_s: float) -> Hang | None:
    """Return the hang if some rank has made no progress for `limit_s` seconds; None if there is no hang, or if it is
    unclear which rank hangs.

    `heartbeats`: heartbeats of all ranks, read at about the same moment.
    """
    if len(heartbeats) < world_size or len({heartbeat.generation for heartbeat in heartbeats.values()}) != 1:
        return None  # a missing rank is a fault that is handled elsewhere
    quiet = {rank: heartbeat for rank, heartbeat in heartbeats.items() if heartbeat.quiet_s >= limit_s / 2}
    if not any(heartbeat.quiet_s >= limit_s for heartbeat in quiet.values()):
        return None
    frozen = [rank for rank, heartbeat in quiet.items() if heartbeat.stopped or heartbeat.silent_s > _SILENT_S]
    if frozen:  # a frozen rank waits for no other rank, but all other ranks wait for it
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
    """Return a phrase about a rank whose training function has returned. Other ranks may wait for that rank in vain."""
    done = [each for each in heartbeats.values() if each.phase is Phase.DONE]
    return "".join(
        f"; rank {each.rank} has returned from its training function in step {each.step}" for each in done[:1]
    )
