"""How often a tier with `every_steps: auto` gets a copy, in a job that runs: from what it measures of itself.

Fed with the events that agents report; `planner.interval_tuning` decides. Only the coordinator has one, so all nodes
agree.
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
"""Seconds until the first checkpoint, and between the first two, where nothing else is said."""
START_PEER_S = 10.0
"""The same of copies on peers. Until the first is named, they are made by the default number of steps."""
_IDLE_STEPS = 64
_WAITED_STEPS = 4096
_HEARD_S = 1.0
"""After so long, all nodes have heard which step was named, and have told their memory servers."""
_TIMEOUT_STEPS = 10
"""After so many intervals a copy that has not arrived is not taken for one that is under way."""
_ENOUGH = 5  # steps beside a copy, and beside none, before anything is concluded from them
_LEAST_STEP_S = 1e-3

_LEAST = 0.005
"""Of the time a copy is on its way, what it takes from training at least: less cannot be told from noise."""


def by_clock(config: RuntimeConfig) -> RuntimeConfig:
    """The settings with durable tiers that are `auto` going by time: the coordinator names their steps."""
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
    """Intervals of peers and durable tiers, in seconds, and of the memory tier, in steps.

    The last changes when a generation begins, with which all ranks hear of it: a step that only some of them have in
    memory is nobody's.

    Args:
        now: when the job began.
        unix: the same moment, by the clock that all machines have.
    """

    def __init__(self, policy: CheckpointPolicy, nodes: int, now: float, unix: float = 0.0) -> None:
        rates, peer = prior_rates(nodes), policy.peer()
        durable_prior = rates.correlated if peer is not None else rates.correlated + rates.node
        self._started, self._started_unix = now, unix
        self._tiers: dict[str, _Tuned] = {
            tier.kind: _Tuned(tier.every_seconds or START_S, durable_prior) for tier in policy.durable() if tier.auto
        }
        self._kinds = {tier.place.rstrip("/"): tier.kind for tier in policy.durable()}
        """Of durable tiers, which agents name by the job's place in them."""
        if peer is not None and peer.auto:
            self._tiers["peer"] = _Tuned(START_PEER_S, rates.node)
        self._idle: deque[float] = deque(maxlen=_IDLE_STEPS)
        self._fell_back: Counter[str] = Counter()
        memory = policy.memory()
        self._memory_every = memory.every_steps if memory is not None and memory.auto else None
        self._memory_prior = rates.process
        self._took: deque[float] = deque(maxlen=_IDLE_STEPS)
        self._waited: deque[tuple[float, int]] = deque(maxlen=_WAITED_STEPS)
        """Of each step: seconds for snapshots, and how many it made. A snapshot is waited for in the step after it."""

    def learned(self) -> dict[str, Any]:
        """What another coordinator needs to go on from here; empty where no tier is `auto`."""
        if not self._tiers and self._memory_every is None:
            return {}
        return {
            "began": self._started_unix,
            "fell_back": dict(self._fell_back),
            "memory_every": self._memory_every,
            "seconds": {kind: tuned.interval for kind, tuned in self._tiers.items()},
        }

    def inherit(self, learned: Mapping[str, Any]) -> None:
        """Go on with what the coordinator before this one had learned; how long copies take is measured anew."""
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
        """Steps between two snapshots in memory; None: as the policy says."""
        return self._memory_every

    def seconds(self, tier: Tier) -> float | None:
        """Seconds between two copies in `tier`; None where it goes by steps."""
        tuned = self._tiers.get(tier.kind)
        return tuned.interval if tuned is not None else getattr(tier, "every_seconds", None)

    def steps_ahead(self) -> int | None:
        """How far ahead of the newest step that is known one must be named, for all nodes to hear before they make it:
        a step may take no longer than the news of it. None: it is not known yet how long steps take."""
        return 2 + math.ceil(_HEARD_S / max(_LEAST_STEP_S, median(self._took))) if self._took else None

    def named(self, kind: str, step: int) -> None:
        """The tier gets a copy of this step next."""
        if kind in self._tiers:
            self._tiers[kind].expect(step)

    def went_on(self, membership: Membership) -> None:
        """A generation goes on; after a fault, and from a tier's copy, that is what copies are for."""
        if membership.faults and membership.decision is not None:
            kinds = {source.kind for several in membership.decision.sources.values() for source in several}
            if "durable" in kinds:
                self._fell_back["durable"] += 1
            elif kinds & {"peer", "parity"}:
                self._fell_back["peer"] += 1
            elif "memory" in kinds:
                self._fell_back["memory"] += 1

    def begins(self, now: float) -> int | None:
        """A generation begins: steps between two snapshots in memory from now on. None: as the policy says."""
        made = sum(count for _, count in self._waited)
        if self._memory_every is None or made < _ENOUGH:
            return self._memory_every
        # without the longest wait: that of the first snapshot is for its memory
        step_s, waited = median(self._took), sum(sorted(seconds for seconds, _ in self._waited)[:-1]) / made
        measured = Measured(now - self._started, self._fell_back["memory"], waited, latency=0.0)
        if step_s > 0:
            best = tune(self._memory_every * step_s, measured, self._memory_prior)
            self._memory_every = max(1, round(best / step_s))
        return self._memory_every

    def heard(self, event: Mapping[str, Any], now: float) -> dict[str, float]:
        """Take in an event; returns the tiers whose interval changed with it. Of its own clock, which may be another
        machine's, only differences are used."""
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
            its = self._tiers.get(kind)
            if its is not None and its.arrived(int(event["newest_step"]), now):
                return self._tune(kind, its, now)
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
    """One tier: its interval, failures per second that are expected of it, and the last few copies."""

    def __init__(self, interval: float, prior: float) -> None:
        self.interval, self.prior = interval, prior
        self.latencies: deque[float] = deque(maxlen=8)
        self.overlapped: deque[list[float]] = deque(maxlen=8)
        """How long the steps took that were made while each was copied."""
        self._expected: int | None = None
        self._since: float | None = None
        self._overdue = False
        self._steps: list[float] = []

    @property
    def copying(self) -> bool:
        """Whether a copy is under way."""
        return self._since is not None and not self._overdue

    def expect(self, step: int) -> None:
        """A copy of `step` will be made. It is followed unless another one still is: agents report seldom. One that
        was made and has not arrived still is, however late: only that tells how long copies take here."""
        if self._expected is None or step < self._expected:  # the job went back by many
            self._forget(step)

    def step_done(self, step: int, took: float, now: float) -> None:
        """Training has made a step."""
        if self._expected is None:
            return
        if self.copying and len(self._steps) < _WAITED_STEPS:
            self._steps.append(took)
        if step == self._expected or (self._since is None and step > self._expected):
            self._since = now
        self._overdue = self._since is not None and now - self._since > _TIMEOUT_STEPS * self.interval

    def arrived(self, step: int, now: float) -> bool:
        """The tier has `step` now; whether that is the copy that was waited for."""
        if self._since is None or self._expected is None or step < self._expected:
            return False
        self.latencies.append(now - self._since)
        self.overlapped.append(self._steps)
        self._forget(None)
        return True

    def _forget(self, expected: int | None) -> None:
        self._expected, self._since, self._overdue, self._steps = expected, None, False, []
