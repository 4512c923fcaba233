"""Every second of every rank in exactly one phase: from the event log to spans that leave no gap. Pure.

Each event of a rank ends one span and begins the next, so what a rank's spans take adds up to the job's wall time,
whatever happened between. In a large job, `every rank` is every one that is sampled. What a phase is:

startup           until the first step begins: imports, processes, groups, model
data              from the beginning of a step to the first forward pass
step              the rest of a step that was kept
checkpoint        within a step, the time in which the training thread waited for a snapshot
first_step        the first step after a fault
lost_work         work on a step that was broken off, or made again later
detect            from a fault to its being seen
abort             until this rank has left its broken step
agree             until the members, ranks and the step to go on from are known
rebuild           new process, process groups, wrappers around the model
restore           until the state is back
idle              before a rank was there, after it had nothing more to do
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
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
"""What goodput counts."""

_REMEMBERED_STEPS = 4096
"""Steps of a running job whose last generation is known."""


@dataclass(frozen=True, slots=True)
class Span:
    """Time of one rank that went into one phase. Times are seconds of the log's clock."""

    rank: int
    phase: SpanPhase
    began: float
    ended: float
    generation: int
    step: int | None = None
    """The step it belongs to, of a step's own phases."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(slots=True)
class Facts:
    """What all ranks have in common."""

    start: float
    end: float
    last_making: dict[int, int]
    """The generation in which each step was made last."""
    injected: tuple[float, ...]
    """When faults were injected."""
    first_step: float
    """When the first rank began its first step; `end` if none did."""


_ENDS: dict[type[Event], SpanPhase] = {
    WorkerStarted: "rebuild",
    Joined: "agree",
    GroupsOpen: "rebuild",
    Restored: "restore",
    Begun: "rebuild",
    Aborted: "abort",
}
"""What a rank was doing until it came to this event."""
_OfRank = WorkerStarted | Joined | GroupsOpen | Restored | Begun | Aborted | Step | Done
"""Events that end a span of one rank."""
_OfAll = Generation | Fault
"""Events that end a span of every rank."""


def spans(events: Events) -> dict[int, list[Span]]:
    """Spans of every rank that the log tells of, in order and without a gap, from its first event to its last."""
    return dict(spans_by_rank(events))


def spans_by_rank(events: Events) -> Iterator[tuple[int, list[Span]]]:
    """The same, one rank after another: those of a long job need not be there all at once."""
    facts = _facts(events)
    concerning: dict[int, list[_OfRank | _OfAll]] = {rank: [] for rank in ranks_of(events)}
    for event in events:
        if isinstance(event, _OfAll):
            for its in concerning.values():
                its.append(event)
        elif isinstance(event, _OfRank) and event.rank in concerning:
            concerning[event.rank].append(event)
    for rank, its in concerning.items():
        builder = SpanBuilder(rank, facts)
        for each in sorted(its, key=lambda event: event.t):
            builder.add(each)
        builder.close()
        yield rank, builder.spans


def ranks_of(events: Events) -> list[int]:
    """Ranks that ever joined, of those that are sampled."""
    return sorted({event.rank for event in events.of(Joined) if is_sampled(event.rank)})


def totals(of_rank: Iterable[Span]) -> dict[SpanPhase, float]:
    """Seconds of each phase."""
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
    """Walks over a rank's events and closes one span after another."""

    def __init__(self, rank: int, facts: Facts) -> None:
        self.rank, self._facts = rank, facts
        self._at = facts.start
        self._step_began = facts.start
        self._generation = 1
        self._joined, self._training, self._done = False, False, False
        self._first_of_generation = False
        self.spans: list[Span] = []

    def add(self, event: _OfRank | _OfAll) -> None:
        """Take in an event of this rank, or of all."""
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
        """Leave out what was before."""
        self._at = moment

    def take(self) -> list[Span]:
        """Hand over the spans so far."""
        spans, self.spans = self.spans, []
        return spans

    def close(self) -> None:
        """To the end of the log."""
        self._until(self._facts.end, "lost_work" if self._training else "idle")

    def _own(self, event: Event) -> None:
        phase = _ENDS[type(event)]
        if isinstance(event, Joined) and not self._joined:
            phase = "rebuild"  # a new process, until it can be counted on
        if isinstance(event, Aborted) and self._training:  # nothing broke: a step's end that all had agreed on
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
        """Broken off: work until the fault was injected, then nobody knew, and now everybody leaves."""
        if not self._training:
            self._until(moment, "agree" if self._joined else "idle")
            return
        # it may have been injected into another rank while this one still ended a step
        injected = max((t for t in self._facts.injected if self._step_began <= t <= moment), default=moment)
        self._until(injected, "lost_work")
        self._until(moment, "detect")
        self._training = False

    def _step(self, made: Step) -> None:
        self._step_began = made.began
        self._until(made.began, "step")  # what the loop does between two steps
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
        """Close a span. What two processes' clocks and the order of writing leave behind an earlier event is empty."""
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
    """Spans while the job runs. What nobody can know yet, such as that a step will be made again, is not in them."""

    def __init__(self) -> None:
        self._facts: Facts | None = None
        self._builders: dict[int, SpanBuilder] = {}

    def add(self, event: Event) -> list[Span]:
        """Take in an event, in the order of the log; returns the spans that end with it."""
        if self._facts is None:
            self._facts = Facts(event.t, math.inf, {}, (), math.inf)
        self._learn(event, self._facts)
        if isinstance(event, WorkerStarted | Joined) and event.rank not in self._builders and is_sampled(event.rank):
            self._builders[event.rank] = SpanBuilder(event.rank, self._facts)
            if self._facts.first_step < math.inf:  # before that it was not there
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
                if len(making) > _REMEMBERED_STEPS:  # of long ago, nobody reports any more
                    del making[next(iter(making))]
            case Generation(world_size=int(ranks)):
                self._builders = {rank: builder for rank, builder in self._builders.items() if rank < ranks}
