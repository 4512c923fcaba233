"""Computes metrics, of bounded size even in a long job, from a job's events, one event after another."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self, get_args

from hyperpod_ext.runtime.detection.failure_causes import FaultKind
from hyperpod_ext.runtime.events.event import Event
from hyperpod_ext.runtime.events.of_checkpoints import Copying
from hyperpod_ext.runtime.events.of_faults import Aborted, Fault
from hyperpod_ext.runtime.events.of_nodes import NodeLost, Resized
from hyperpod_ext.runtime.events.of_training import (
    Begun,
    Done,
    Generation,
    Go,
    GroupsOpen,
    JobEnded,
    JobStarted,
    Joined,
    Restored,
    Skipped,
    Step,
    WorkerStarted,
    count_sampled,
    is_sampled,
)
from hyperpod_ext.runtime.events.phases import KEPT, PHASES, LivePhases, SpanPhase
from hyperpod_ext.runtime.membership.actions import EscalationLevel
from hyperpod_ext.runtime.metrics.families import Family, Histogram, Labels, Sample, counter, gauge

_STEP_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_RECOVERY_BOUNDS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_FAULTS = [(kind, level) for kind in get_args(FaultKind) for level in (*(its.value for its in EscalationLevel), "")]
"""Pairs of labels (kind, escalation level) of the metric `hpx_faults_total`. All pairs are exported from the start,
because Prometheus' increase() does not see the first value of a new series."""
_REMEMBERED_STEPS = 4096
"""Number of steps whose time is remembered, to subtract the time of steps that the job repeats after a restore."""


@dataclass(slots=True)
class RankNow:
    """Latest known activity of one rank. `t` is a time by the log's clock, in seconds."""

    phase: str = "startup"
    step: int | None = None
    step_s: float | None = None
    node: int | None = None
    t: float = 0.0


@dataclass(slots=True)
class _Made:
    """The number of ranks that have made one step, and the sum of their times."""

    ranks: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Meters:
    """The metrics of one job, computed from the events so far."""

    step: int | None = None
    of: int | None = None
    loss: float | None = None
    world_size: int | None = None
    nodes: int | None = None
    generation: int = 0
    state: str = "starting"
    began_t: float | None = None
    """Time at which the job began, in seconds of the log's clock."""
    last_step_t: float | None = None
    """Time at which a rank last made a step, in seconds of the log's clock."""
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of faults, by kind and escalation level."""
    recoveries: int = 0
    steps_made: int = 0
    """Number of steps that were made, without repetitions."""
    steps_lost: int = 0
    steps_skipped: int = 0
    nodes_lost: int = 0
    seconds: dict[SpanPhase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Seconds of all ranks together in each phase. Time that is later found to be lost still counts as a step."""
    tiers: dict[str, int] = field(default_factory=dict)
    """Newest step that each tier has, by tier."""
    tier_failures: Counter[str] = field(default_factory=Counter)
    ranks: dict[int, RankNow] = field(default_factory=dict)
    step_seconds: Histogram = field(default_factory=lambda: Histogram(_STEP_BOUNDS))
    recovery_seconds: Histogram = field(default_factory=lambda: Histogram(_RECOVERY_BOUNDS))
    _phases: LivePhases = field(default_factory=LivePhases)
    _recent: OrderedDict[int, _Made] = field(default_factory=OrderedDict)
    _failed_by: dict[tuple[str, int], int] = field(default_factory=dict)
    _lost_work: float = 0.0
    _faulty_since: float | None = None
    """Time of the first fault from which the job has not recovered yet; None if there is no such fault."""
    _broken_generation: int = -1
    """Number of the generation in which the last fault was detected."""

    @classmethod
    def before_any_copy(cls, tiers: Iterable[str]) -> Self:
        """Return meters that count 0 failed copies for each tier.

        Without the count of 0, Prometheus' increase() would miss the first failure, because it does not see the first
        value of a series."""
        return cls(tier_failures=Counter(dict.fromkeys(tiers, 0)))

    def add(self, event: Event) -> None:
        """Count one event. Events of kinds that no metric needs are ignored."""
        match event:
            case JobStarted():
                self.world_size, self.nodes = event.world_size, event.nodes
                self.began_t = event.t
            case Step():
                self._add_step(event)
            case Fault():
                self.faults[event.kind, event.escalation_level] += 1
                self._faulty_since = self._faulty_since or event.t
                self._broken_generation = self.generation
                self.state = "recovering"
                for now in self.ranks.values():
                    now.phase = "abort"
                rank = self._rank(event.rank, event.t)
                rank.phase, rank.node = "rebuild", event.node
            case Generation():
                self._enter(event)
            case Go():
                self._go_on_from(event.step)
            case Resized():
                self.nodes = event.nodes
            case NodeLost():
                self.nodes_lost += 1
            case Skipped():
                self.steps_skipped += 1
            case Copying():
                self._add_copy(event)
            case WorkerStarted() | Joined() | GroupsOpen() | Restored() | Begun() | Aborted() | Done():
                rank = self._rank(event.rank, event.t)
                rank.phase, rank.t = _NEXT[type(event)], event.t
                if isinstance(event, WorkerStarted):
                    rank.node = event.node
                if isinstance(event, Begun | Done) and not is_sampled(event.rank):
                    # drop this rank, because the log has no events of the rank until the next fault
                    del self.ranks[event.rank]
            case JobEnded():
                self.state = event.state
        for span in self._phases.add(event):
            self.seconds[span.phase] += span.seconds
            if span.step is not None and span.phase in KEPT:
                self._made(span.step).seconds += span.seconds

    @property
    def goodput(self) -> float | None:
        """Share of all ranks' time spent on steps that count, as far as known now; None if no time has passed."""
        total = sum(self.seconds.values())
        if not total:
            return None
        return max(0.0, sum(self.seconds[phase] for phase in KEPT) - self._lost_work) / total

    def families(self, epoch: float) -> list[Family]:
        """Return all metrics for Prometheus. `epoch`: Unix time in seconds when the log's clock was 0."""
        began, last = (None if t is None else t + epoch for t in (self.began_t, self.last_step_t))
        pairs = dict.fromkeys([*_FAULTS, *self.faults])
        by_fault = {
            _labels(kind=kind, escalation_level=level): float(self.faults[kind, level]) for kind, level in pairs
        }
        by_phase = {_labels(phase=phase): seconds for phase, seconds in self.seconds.items()}
        held = tuple(Sample(step, _labels(tier=tier)) for tier, step in sorted(self.tiers.items()))
        failed = {_labels(tier=tier): float(count) for tier, count in self.tier_failures.items()}
        return [
            gauge("hpx_step", "Newest step that was made.", self.step),
            gauge("hpx_steps_planned", "Steps the job will make.", self.of),
            gauge("hpx_loss", "Loss of the newest step.", self.loss),
            gauge("hpx_world_size", "Ranks of the job.", self.world_size),
            gauge("hpx_nodes", "Nodes of the job, spares not counted.", self.nodes),
            gauge("hpx_generation", "Number of the present generation.", self.generation),
            gauge("hpx_goodput_ratio", "Share of all ranks' time that was spent on steps that count.", self.goodput),
            gauge("hpx_job_started_timestamp_seconds", "Unix time at which the job began.", began),
            gauge("hpx_last_step_timestamp_seconds", "Unix time at which a rank last made a step.", last),
            counter("hpx_steps_total", "Steps made for the first time.", self.steps_made),
            counter("hpx_steps_lost_total", "Steps that all ranks had made and had to repeat.", self.steps_lost),
            counter("hpx_steps_skipped_total", "Steps that the NaN guard has skipped.", self.steps_skipped),
            counter("hpx_faults_total", "Faults by kind and escalation level.", by_fault),
            counter("hpx_recoveries_total", "Faults from which the job has recovered.", self.recoveries),
            counter("hpx_nodes_lost_total", "Nodes that were lost.", self.nodes_lost),
            counter("hpx_phase_seconds_total", "Seconds of all ranks together, by phase.", by_phase),
            Family("hpx_tier_newest_step", "gauge", "Newest step that a tier has.", held),
            counter("hpx_tier_failures_total", "Copies to a tier that failed.", failed),
            Family("hpx_step_seconds", "histogram", "Seconds of one step of one rank.", self.step_seconds.samples()),
            Family(
                "hpx_recovery_seconds",
                "histogram",
                "Seconds from the detection of a fault to the end of the next step.",
                self.recovery_seconds.samples(),
            ),
        ]

    def _add_step(self, made: Step) -> None:
        if is_sampled(made.rank):
            rank = self._rank(made.rank, made.t)
            rank.phase, rank.step, rank.step_s, rank.t = "step", made.step, made.took, made.t
            self.step_seconds.observe(made.took)
            self._made(made.step).ranks += 1
        self.of = made.of or self.of
        if self.step is None or made.step > self.step:
            self.step = made.step
            self.steps_made += 1
        if made.step == self.step and (loss := made.logged.get("loss")) is not None:
            self.loss = loss
        self.last_step_t = max(self.last_step_t or made.t, made.t)
        # ignore the step of a rank that was past its last collective when another rank failed
        if made.generation <= self._broken_generation:
            return
        # keep the state after the end of the job, because the event of a step may arrive late
        if self.state in ("starting", "recovering"):
            self.state = "running"
        if self._faulty_since is not None:
            self.recoveries += 1
            self.recovery_seconds.observe(max(0.0, made.t - self._faulty_since))
            self._faulty_since = None

    def _made(self, step: int) -> _Made:
        made = self._recent.get(step)
        if made is None:
            made = self._recent[step] = _Made()
            if len(self._recent) > _REMEMBERED_STEPS:
                self._recent.popitem(last=False)
        return made

    def _enter(self, begins: Generation) -> None:
        self.generation = begins.generation
        if begins.world_size is not None:
            self.world_size = begins.world_size
            self.ranks = {rank: now for rank, now in self.ranks.items() if rank < begins.world_size}
        for now in self.ranks.values():
            now.phase, now.t = "rebuild", begins.t

    def _go_on_from(self, step: int) -> None:
        """Continue after `step`. Steps after `step` will be repeated, so the time that they took counts as lost."""
        again = [made for made in self._recent if made > step]
        sampled = count_sampled(self.world_size or 1)
        everywhere = [made for made in again if self._recent[made].ranks >= sampled]
        self.steps_lost += max(everywhere, default=step) - step
        self._lost_work += sum(self._recent.pop(made).seconds for made in again)

    def _add_copy(self, copying: Copying) -> None:
        tier = copying.tier
        if copying.newest_step is not None:
            self.tiers[tier] = max(self.tiers.get(tier, 0), copying.newest_step)
        # each node counts its own failures, from 0 again when its memory server is restarted
        of = tier, copying.node
        before, self._failed_by[of] = self._failed_by.get(of, 0), copying.failed
        self.tier_failures[tier] += max(0, copying.failed - before)

    def _rank(self, rank: int, moment: float) -> RankNow:
        return self.ranks.setdefault(rank, RankNow(t=moment))


_NEXT: dict[type[Event], str] = {
    WorkerStarted: "rebuild",
    Joined: "agree",
    GroupsOpen: "restore",
    Restored: "rebuild",
    Begun: "step",
    Aborted: "agree",
    Done: "idle",
}
"""The activity of a rank after each kind of event."""


def _labels(**labels: str) -> Labels:
    return tuple(labels.items())
