"""Tunes the checkpoint intervals of tiers with `every_steps: auto`, from measurements of the running job.

The measurements are events that agents report. `planner.interval_tuning` computes the intervals from the measurements.
Only the coordinator tunes, so that all nodes use the same intervals.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from hyperpod_ext.config.checkpoint import CheckpointPolicy, DurableTier, Tier
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.planner.interval_tuning import Measured, prior_rates, tune
from hyperpod_ext.runtime.membership.membership import Membership

START_S = 60.0
"""First interval of copies to a durable tier, in seconds, if the spec sets no interval."""
START_PEER_S = 10.0
"""First interval of copies to peer nodes, in seconds. Before the coordinator has scheduled its first copy, peers get
copies at the default interval in steps."""
_IDLE_STEPS = 64
_WAITED_STEPS = 4096
_SCHEDULED_S = 1.0
"""Number of seconds after which every memory server has received the schedule of a step."""
_TIMEOUT_INTERVALS = 10
"""Number of intervals after which a copy that has not arrived is treated as lost."""
_ENOUGH = 5
"""Number of measurements before the first tuning: snapshots for the memory tier, otherwise steps without a copy."""
_LEAST_STEP_S = 1e-3

_LEAST = 0.005
"""Smallest share of a copy's duration by which the copy is assumed to delay training. Delays of training below this
share cannot be measured."""


def by_clock(config: RuntimeConfig) -> RuntimeConfig:
    """Return the job settings in which each durable tier with interval `auto` has an interval in seconds. With an
    interval in seconds, the coordinator schedules the steps to copy."""
    tiers = tuple(
        tier.model_copy(update={"every_seconds": START_S})
        if isinstance(tier, DurableTier) and tier.auto and tier.every_seconds is None
        else tier
        for tier in config.checkpoint.tiers
    )
    if tiers == config.checkpoint.tiers:
        return config
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"tiers": tiers})})


class Tuner:
    """Tunes the intervals of copies to peers and to durable tiers, in seconds, and the interval of snapshots in memory,
    in steps.

    The interval of snapshots in memory changes only when a generation begins, so that all ranks change it at the same
    step. If ranks saved different steps to memory, no step could be restored.

    Args:
        now: start of the job, as time of this machine's monotonic clock.
        unix: start of the job, as Unix time.
    """

    def __init__(self, policy: CheckpointPolicy, nodes: int, now: float, unix: float = 0.0) -> None:
        rates, peer = prior_rates(nodes), policy.peer()
        durable_prior = rates.correlated if peer is not None else rates.correlated + rates.node
        self._started, self._started_unix = now, unix
        self._tiers: dict[str, _Tuned] = {
            tier.kind: _Tuned(tier.every_seconds or START_S, durable_prior) for tier in policy.durable() if tier.auto
        }
        self._kinds = {tier.place.rstrip("/"): tier.kind for tier in policy.durable()}
        """Maps the URL or path of each durable tier to its kind. Events name a durable tier by the job's folder below
        that URL or path."""
        if peer is not None and peer.auto:
            self._tiers["peer"] = _Tuned(START_PEER_S, rates.node)
        self._idle: deque[float] = deque(maxlen=_IDLE_STEPS)
        self._fell_back: Counter[str] = Counter()
        memory = policy.memory()
        self._memory_every = memory.every_steps if memory is not None and memory.auto else None
        self._memory_prior = rates.process
        self._took: deque[float] = deque(maxlen=_IDLE_STEPS)
        self._waited: deque[tuple[float, int]] = deque(maxlen=_WAITED_STEPS)
        """For each of the latest steps, the number of seconds that training waited for a snapshot, and the number of
        snapshots taken. A step waits for the snapshot of the previous step."""

    def learned(self) -> dict[str, Any]:
        """Return the tuner's state as JSON for the job state, from which the next coordinator continues. The result is
        empty if no tier has the interval `auto`."""
        if not self._tiers and self._memory_every is None:
            return {}
        return {
            "began": self._started_unix,
            "fell_back": dict(self._fell_back),
            "memory_every": self._memory_every,
            "seconds": {kind: tuned.interval for kind, tuned in self._tiers.items()},
        }

    def inherit(self, learned: Mapping[str, Any]) -> None:
        """Continue from the state of the former coordinator's tuner (see `learned`). The durations of copies are not
        part of this state and are measured again."""
        if not learned:
            return
        self._started -= max(0.0, self._started_unix - learned["began"])
        self._started_unix = learned["began"]
        self._fell_back.update(learned["fell_back"])
        if self._memory_every is not None:
            self._memory_every = learned["memory_every"]
        for kind in self._tiers.keys() & learned["seconds"].keys():
            self._tiers[kind].interval = learned["seconds"][kind]

    @property
    def memory_every(self) -> int | None:
        """Number of steps between two snapshots in memory; None if the interval in the checkpoint policy applies."""
        return self._memory_every

    def seconds(self, tier: Tier) -> float | None:
        """Return the number of seconds between two copies to `tier`; None if the tier's interval is in steps."""
        tuned = self._tiers.get(tier.kind)
        return tuned.interval if tuned is not None else getattr(tier, "every_seconds", None)

    def steps_ahead(self) -> int | None:
        """Return the number of steps by which a copy must be scheduled ahead, so that every node receives the schedule
        before it makes that step. Returns None if no step was measured yet."""
        return 2 + math.ceil(_SCHEDULED_S / max(_LEAST_STEP_S, median(self._took))) if self._took else None

    def named(self, kind: str, step: int) -> None:
        """Record that `step` is the next step that will be copied to the tier of this `kind`."""
        if kind in self._tiers:
            self._tiers[kind].expect(step)

    def went_on(self, membership: Membership) -> None:
        """When a generation starts to train after a fault, count from which kind of tier its state was restored."""
        if membership.faults and membership.decision is not None:
            kinds = {source.kind for several in membership.decision.sources.values() for source in several}
            if "durable" in kinds:
                self._fell_back["durable"] += 1
            elif kinds & {"peer", "parity"}:
                self._fell_back["peer"] += 1
            elif "memory" in kinds:
                self._fell_back["memory"] += 1

    def begins(self, now: float) -> int | None:
        """Tune the interval of snapshots in memory at the start of a generation. Returns the number of steps between
        two snapshots; None if the interval in the checkpoint policy applies."""
        made = sum(count for _, count in self._waited)
        if self._memory_every is None or made < _ENOUGH:
            return self._memory_every
        # leave out the longest wait: the first snapshot takes longest, because it also allocates memory
        step_s, waited = median(self._took), sum(sorted(seconds for seconds, _ in self._waited)[:-1]) / made
        measured = Measured(now - self._started, self._fell_back["memory"], waited, latency=0.0)
        if step_s > 0:
            best = tune(self._memory_every * step_s, measured, self._memory_prior)
            self._memory_every = max(1, round(best / step_s))
        return self._memory_every

    def heard(self, event: Mapping[str, Any], now: float) -> dict[str, float]:
        """Update the measurements from an event. Returns a map from kind of tier to new interval in seconds, for each
        tier whose interval has changed.

        The times in an event may come from the clock of another machine, so only differences between them are used.
        """
        if event["event"] == "step" and "began" in event and int(event["rank"]) == 0:
            took = float(event["t"]) - float(event["began"])
            self._took.append(took)
            self._waited.append((float(event.get("checkpoint_s", 0.0)), int(event.get("snapshot", 0))))
            if not any(tuned.copying for tuned in self._tiers.values()):
                self._idle.append(took)
            for tuned in self._tiers.values():
                tuned.step_done(int(event["step"]), took, now)
        elif event["event"] == "copying" and event["newest_step"] is not None:
            kind = self._kinds.get(str(event["tier"]).rpartition("/")[0], "peer")
            tuned_tier = self._tiers.get(kind)
            if tuned_tier is not None and tuned_tier.arrived(int(event["newest_step"]), now):
                return self._tune(kind, tuned_tier, now)
        return {}

    def _tune(self, kind: str, tuned: _Tuned, now: float) -> dict[str, float]:
        if len(self._idle) < _ENOUGH or not tuned.latencies:
            return {}
        usual = median(self._idle)
        latency = median(tuned.latencies)
        blocked = max(_LEAST * latency, median(sum(took - usual for took in steps) for steps in tuned.overlapped))
        failures = self._fell_back["peer" if kind == "peer" else "durable"]
        measured = Measured(now - self._started, failures, blocked, latency)
        before, tuned.interval = tuned.interval, tune(tuned.interval, measured, tuned.prior)
        return {kind: tuned.interval} if tuned.interval != before else {}


class _Tuned:
    """Measurements of one tier: its interval, the expected rate (per second) of failures that need this tier, and its
    latest copies."""

    def __init__(self, interval: float, prior: float) -> None:
        self.interval, self.prior = interval, prior
        self.latencies: deque[float] = deque(maxlen=8)
        self.overlapped: deque[list[float]] = deque(maxlen=8)
        """For each of the latest copies, the durations of all training steps during the copy, in seconds."""
        self._expected: int | None = None
        self._since: float | None = None
        self._overdue = False
        self._steps: list[float] = []

    @property
    def copying(self) -> bool:
        """Whether a copy to the tier is being made."""
        return self._since is not None and not self._overdue

    def expect(self, step: int) -> None:
        """Record that `step` will be copied. Measure this copy's duration, unless an earlier copy is still being
        measured.

        The measurement of a late copy is never given up, because its long duration is the information that is needed.
        """
        # a step lower than the expected one means that the job has restored an earlier step
        if self._expected is None or step < self._expected:
            self._forget(step)

    def step_done(self, step: int, took: float, now: float) -> None:
        """Record that training step `step` has ended and took `took` seconds."""
        if self._expected is None:
            return
        if self.copying and len(self._steps) < _WAITED_STEPS:
            self._steps.append(took)
        if step == self._expected or (self._since is None and step > self._expected):
            self._since = now
        self._overdue = self._since is not None and now - self._since > _TIMEOUT_INTERVALS * self.interval

    def arrived(self, step: int, now: float) -> bool:
        """Record that the tier's newest copy is now a copy of `step`. Returns whether the copy that was being measured
        has now arrived."""
        if self._since is None or self._expected is None or step < self._expected:
            return False
        self.latencies.append(now - self._since)
        self.overlapped.append(self._steps)
        self._forget(None)
        return True

    def _forget(self, expected: int | None) -> None:
        self._expected, self._since, self._overdue, self._steps = expected, None, False, []
