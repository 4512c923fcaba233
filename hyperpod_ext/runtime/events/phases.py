"""Assigns every second of every rank to exactly one phase: computes gapless spans from the event log. Pure functions.

Each event of a rank ends one span of the rank and begins the next one, so that a rank's spans always add up to the
job's wall time. In a large job, only sampled ranks are counted (`of_training.is_sampled`). The phases:

startup           until the first step begins: imports, processes, process groups, model
data              from the beginning of a step to its first forward pass
step              the rest of a step that counts
checkpoint        the time in a step during which the training thread waits for a snapshot
first_step        the first step after a fault
lost_work         work on a step that is aborted, or is repeated later
detect            from a fault to its detection
abort             from the detection of a fault until this rank has left its aborted step
agree             until members, ranks and the step to restore are decided
rebuild           making processes, process groups and wrappers around the model
restore           until the state is restored
idle              before the rank's process exists, and after its work is done
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from hyperpod_ext.runtime.events.event import Event, Events
from hyperpod_ext.runtime.events.of_faults import Aborted, Fault, Injected, Killed
from hyperpod_ext.runtime.events.of_training import (
    Begun,
    Done,
    Generation,
    GroupsOpen,
    Joined,
    Restored,
    Step,
    WorkerStarted,
    is_sampled,
)

SpanPhase = Literal[
    "startup",
    "data",
    "step",
    "checkpoint",
    "first_step",
    "lost_work",
    "detect",
    "abort",
    "agree",
    "rebuild",
    "restore",
    "idle",
]
PHASES: tuple[SpanPhase, ...] = get_args(SpanPhase)

KEPT: tuple[SpanPhase, ...] = ("step", "data", "checkpoint", "first_step")
"""Phases of useful work, whose time counts as goodput."""

_REMEMBERED_STEPS = 4096
"""Number of steps of a running job for which we remember the newest generation that made them."""


@dataclass(frozen=True, slots=True)
class Span:
    """A time span of one rank in one phase. `began` and `ended` are seconds of the log's clock."""

    rank: int
    phase: SpanPhase
    began: float
    ended: float
    generation: int
    step: int | None = None
    """Number of the step if the phase belongs to a step, else None."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(slots=True)
class Facts:
    """Facts about the whole job from which the spans of each rank are computed."""

    start: float
    end: float
    last_making: dict[int, int]
    """Number of the last generation that made each step, by step."""
    injected: tuple[float, ...]
    """Times at which faults were injected, in seconds of the log's clock."""
    first_step: float
    """Time at which the first of all ranks began its first step; `end` if no rank made a step."""


_ENDS: dict[type[Event], SpanPhase] = {
    WorkerStarted: "rebuild",
    Joined: "agree",
    GroupsOpen: "rebuild",
    Restored: "restore",
    Begun: "rebuild",
    Aborted: "abort",
}
"""For each kind of event, the phase that an event of this kind ends."""
_OfRank = WorkerStarted | Joined | GroupsOpen | Restored | Begun | Aborted | Step | Done
"""Events that end the current span of one rank."""
_OfAll = Generation | Fault
"""Events that end the current span of every rank."""


def spans(events: Events) -> dict[int, list[Span]]:
    """Return the spans of each sampled rank, in order and without gaps, from the log's first to its last event."""
    return dict(spans_by_rank(events))


def spans_by_rank(events: Events, also: Collection[int] = ()) -> Iterator[tuple[int, list[Span]]]:
    """Yield each rank with its spans, so that the spans of all ranks of a long job are never in memory at once.

    Args:
        also: more ranks to yield, such as failed ranks. If the steps of a rank in `also` are not logged, the rank's
            first step in each generation ends with the same step of the slowest sampled rank.
    """
    facts = _facts(events)
    sampled = ranks_of(events)
    concerning: dict[int, list[_OfRank | _OfAll]] = {rank: [] for rank in dict.fromkeys([*sampled, *also])}
    for event in events:
        if isinstance(event, _OfAll):
            for its in concerning.values():
                its.append(event)
        elif isinstance(event, _OfRank) and event.rank in concerning:
            concerning[event.rank].append(event)
    first_steps = _first_steps(events) if len(concerning) > len(sampled) else []
    for rank, its in concerning.items():
        if not any(isinstance(event, Step) for event in its):
            # insert the steps at the front, so that a step is before the rank's event at the same moment
            its[:0] = first_steps
        builder = SpanBuilder(rank, facts)
        for each in sorted(its, key=lambda event: event.t):
            builder.add(each)
        builder.close()
        yield rank, builder.spans


def ranks_of(events: Events) -> list[int]:
    """Return all sampled ranks that have joined at some time."""
    return sorted({event.rank for event in events.of(Joined) if is_sampled(event.rank)})


def _first_steps(events: Events) -> list[Step]:
    """Return the first step of each generation, as the slowest sampled rank made it. In the returned steps, `began` is
    not the start time of the step, because another rank may have been ready earlier or later."""
    first: dict[int, Step] = {}
    for made in events.of(Step):
        known = first.setdefault(made.generation, made)
        if (made.step, -made.t) < (known.step, -known.t):
            first[made.generation] = made
    return [made.model_copy(update={"began": events.start}) for made in first.values()]


def totals(of_rank: Iterable[Span]) -> dict[SpanPhase, float]:
    """Return the total time in each phase, in seconds."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for span in of_rank:
        seconds[span.phase] += span.seconds
    return seconds


def _facts(events: Events) -> Facts:
    making: dict[int, int] = {}
    for step in events.of(Step):
        making[step.step] = max(making.get(step.step, 0), step.generation)
    return Facts(
        start=events.start,
        end=events.end,
        last_making=making,
        injected=tuple(sorted(event.t for event in (*events.of(Killed), *events.of(Injected)))),
        first_step=min((step.began for step in events.of(Step)), default=events.end),
    )


class SpanBuilder:
    """Builds the spans of one rank from the rank's events."""

    def __init__(self, rank: int, facts: Facts) -> None:
        self.rank, self._facts = rank, facts
        self._at = facts.start
        self._step_began = facts.start
        self._generation = 1
        self._joined, self._training, self._done = False, False, False
        self._first_of_generation = False
        self.spans: list[Span] = []

    def add(self, event: _OfRank | _OfAll) -> None:
        """Process the next event, which concerns this rank or all ranks."""
        match event:
            case Step():
                self._step(event)
            case Fault():
                self._fault(event.t)
            case Generation():
                self._until(event.t, "agree" if self._joined else "idle")
                self._generation = event.generation
            case Done():
                self._until(event.t, "step")
                self._done, self._training = True, False
            case _:
                self._own(event)

    def begin_at(self, moment: float) -> None:
        """Start the rank's spans at `moment`. Time before `moment` is not counted."""
        self._at = moment

    def take(self) -> list[Span]:
        """Return the finished spans, and remove them from this object."""
        spans, self.spans = self.spans, []
        return spans

    def close(self) -> None:
        """End the last span at the end of the log."""
        self._until(self._facts.end, "lost_work" if self._training else "idle")

    def _own(self, event: Event) -> None:
        phase = _ENDS[type(event)]
        # count the time until a new process joins as phase `rebuild`
        if isinstance(event, Joined) and not self._joined:
            phase = "rebuild"
        # an abort without a fault means that ranks agreed to stop after this step
        if isinstance(event, Aborted) and self._training:
            phase = "agree"
        if isinstance(event, WorkerStarted):
            self._joined = False
        self._until(event.t, phase)
        self._joined = self._joined or isinstance(event, Joined)
        if isinstance(event, Begun):
            self._training, self._first_of_generation = True, self._generation > 1
        elif isinstance(event, Aborted):
            self._training = False

    def _fault(self, moment: float) -> None:
        """Divide the time of an aborted step: lost work until the fault was injected, then detection of the fault."""
        if not self._training:
            self._until(moment, "agree" if self._joined else "idle")
            return
        # include injections during this rank's last complete step, because the fault may be in another rank
        injected = max((t for t in self._facts.injected if self._step_began <= t <= moment), default=moment)
        self._until(injected, "lost_work")
        self._until(moment, "detect")
        self._training = False

    def _step(self, made: Step) -> None:
        self._step_began = made.began
        self._until(made.began, "step")  # the work of the training loop between two steps counts as phase `step`
        if self._facts.last_making[made.step] > made.generation:
            self._until(made.t, "lost_work", made.step)
            return
        if self._first_of_generation:
            self._first_of_generation = False
            self._until(made.t, "first_step", made.step)
            return
        self._until(min(made.t, made.began + made.data_s), "data", made.step)
        self._until(max(self._at, made.t - made.checkpoint_s), "step", made.step)
        self._until(made.t, "checkpoint", made.step)

    def _until(self, moment: float, phase: SpanPhase, step: int | None = None) -> None:
        """End the current span at `moment`. Add no span if events are out of order, by clocks or late writing."""
        if moment <= self._at:
            return
        if phase != "idle" and not self._done and self._at < self._facts.first_step and not self._training:
            phase = "startup"
        last = self.spans[-1] if self.spans else None
        if last is not None and last.phase == phase and last.step == step and last.generation == self._generation:
            self.spans[-1] = Span(self.rank, phase, last.began, moment, self._generation, step)
        else:
            self.spans.append(Span(self.rank, phase, self._at, moment, self._generation, step))
        self._at = moment


class LivePhases:
    """Builds the spans of a running job. A span that was returned never changes, even if its step is repeated later."""

    def __init__(self) -> None:
        self._facts: Facts | None = None
        self._builders: dict[int, SpanBuilder] = {}

    def add(self, event: Event) -> list[Span]:
        """Process the next event of the log. Returns the spans that the event ends."""
        if self._facts is None:
            self._facts = Facts(event.t, math.inf, {}, (), math.inf)
        self._learn(event, self._facts)
        if isinstance(event, WorkerStarted | Joined) and event.rank not in self._builders and is_sampled(event.rank):
            self._builders[event.rank] = SpanBuilder(event.rank, self._facts)
            if self._facts.first_step < math.inf:  # the rank did not exist before this event
                self._builders[event.rank].begin_at(event.t)
        ended = []
        if isinstance(event, _OfAll):
            for builder in self._builders.values():
                builder.add(event)
                ended += builder.take()
        elif isinstance(event, _OfRank) and event.rank in self._builders:
            self._builders[event.rank].add(event)
            ended = self._builders[event.rank].take()
        return ended

    def _learn(self, event: Event, facts: Facts) -> None:
        match event:
            case Killed() | Injected():
                facts.injected = (*facts.injected[-8:], event.t)
            case Step():
                facts.first_step = min(facts.first_step, event.began)
                making = facts.last_making
                making[event.step] = max(making.pop(event.step, 0), event.generation)
                if len(making) > _REMEMBERED_STEPS:  # forget older steps, which are no longer reported
                    del making[next(iter(making))]
            case Generation(world_size=int(ranks)):
                self._builders = {rank: builder for rank, builder in self._builders.items() if rank < ranks}
