"""Every second of every rank in exactly one phase: from the event log to spans that leave no gap. Pure.

Each event of a rank ends one span and begins the next, so what a rank's spans take adds up to the job's wall time,
whatever happened between. What a phase is:

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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Event = dict[str, Any]

Phase = Literal[
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
PHASES: tuple[Phase, ...] = get_args(Phase)

KEPT: tuple[Phase, ...] = ("step", "data", "checkpoint", "first_step")
"""What goodput counts."""


@dataclass(frozen=True, slots=True)
class Span:
    """Time of one rank that went into one phase. Times are seconds of the log's clock."""

    rank: int
    phase: Phase
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
    struck: tuple[float, ...]
    """When faults were inflicted, where that is known."""
    faults: tuple[float, ...]
    """When faults were seen."""
    first_step: float
    """When the first rank began its first step; `end` if none did."""


def spans(events: Sequence[Event]) -> dict[int, list[Span]]:
    """Spans of every rank that the log tells of, in order and without a gap, from its first event to its last."""
    return dict(spans_by_rank(events))


def spans_by_rank(events: Sequence[Event]) -> Iterator[tuple[int, list[Span]]]:
    """The same, one rank after another: those of a long job need not be there all at once."""
    if not events:
        return
    facts = _facts(events)
    concerning: dict[int, list[Event]] = {rank: [] for rank in ranks_of(events)}
    for event in events:
        every = event["event"] in ("generation", "fault")
        for each in concerning.values() if every else [concerning.get(event.get("rank", -1), [])]:
            each.append(event)
    for rank, own in concerning.items():
        yield rank, _of_rank(rank, own, facts)


def ranks_of(events: Iterable[Event]) -> list[int]:
    """Ranks that ever joined."""
    return sorted({event["rank"] for event in events if event["event"] == "joined"})


def totals(of_rank: Iterable[Span]) -> dict[Phase, float]:
    """Seconds of each phase."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for span in of_rank:
        seconds[span.phase] += span.seconds
    return seconds


def _facts(events: Sequence[Event]) -> Facts:
    making: dict[int, int] = {}
    for event in events:
        if event["event"] == "step":
            making[event["step"]] = max(making.get(event["step"], 0), event["generation"])
    end = max(event["t"] for event in events)
    return Facts(
        start=events[0]["t"],
        end=end,
        last_making=making,
        struck=tuple(sorted(e["t"] for e in events if e["event"] in ("killed", "injected"))),
        faults=tuple(sorted(e["t"] for e in events if e["event"] == "fault")),
        first_step=min((e["began"] for e in events if e["event"] == "step"), default=end),
    )


_ENDS: dict[str, Phase] = {
    "worker_started": "rebuild",
    "joined": "agree",
    "groups_open": "rebuild",
    "restored": "restore",
    "begun": "rebuild",
    "freed": "abort",
}
"""What a rank was doing until it came to this event."""


def _of_rank(rank: int, events: Sequence[Event], facts: Facts) -> list[Span]:
    teller = Teller(rank, facts)
    for event in sorted((e for e in events if concerns(e, rank)), key=moment_of):
        teller.tell(event)
    teller.close()
    return teller.spans


def concerns(event: Mapping[str, Any], rank: int) -> bool:
    """Whether an event ends a span of this rank: its own, or one that all of them wait for."""
    if event["event"] in ("generation", "fault"):
        return True
    return event.get("rank") == rank and event["event"] in (*_ENDS, "step", "done")


def moment_of(event: Mapping[str, Any]) -> float:
    return float(event["t"])


class Teller:
    """Walks over a rank's events and closes one span after another."""

    def __init__(self, rank: int, facts: Facts) -> None:
        self.rank, self._facts = rank, facts
        self._at = facts.start
        self._step_began = facts.start
        self._generation = 1
        self._joined, self._training, self._done = False, False, False
        self._first_of_generation = False
        self.spans: list[Span] = []

    def tell(self, event: Mapping[str, Any]) -> None:
        kind, moment = event["event"], moment_of(event)
        if kind == "step":
            self._step(event)
        elif kind == "fault":
            self._fault(moment)
        elif kind == "generation":
            self._until(moment, "agree" if self._joined else "idle")
            self._generation = event["generation"]
        elif kind == "done":
            self._until(moment, "step")
            self._done, self._training = True, False
        else:
            self._own(kind, moment)

    def begin_at(self, moment: float) -> None:
        """Leave out what was before."""
        self._at = moment

    def take(self) -> list[Span]:
        """Hand over the spans so far."""
        taken, self.spans = self.spans, []
        return taken

    def close(self) -> None:
        """To the end of the log."""
        self._until(self._facts.end, "lost_work" if self._training else "idle")

    def _own(self, kind: str, moment: float) -> None:
        phase = _ENDS[kind]
        if kind == "joined" and not self._joined:
            phase = "rebuild"  # a new process, until it can be counted on
        if kind == "freed" and self._training:  # nothing broke: a step's end that all had agreed on
            phase = "agree"
        if kind == "worker_started":
            self._joined = False
        self._until(moment, phase)
        self._joined = self._joined or kind == "joined"
        if kind == "begun":
            self._training, self._first_of_generation = True, self._generation > 1
        elif kind == "freed":
            self._training = False

    def _fault(self, moment: float) -> None:
        """Broken off: work until the fault struck, then nobody knew, and now everybody leaves."""
        if not self._training:
            self._until(moment, "agree" if self._joined else "idle")
            return
        # it may have struck another rank while this one still ended a step
        struck = max((t for t in self._facts.struck if self._step_began <= t <= moment), default=moment)
        self._until(struck, "lost_work")
        self._until(moment, "detect")
        self._training = False

    def _step(self, event: Mapping[str, Any]) -> None:
        began, moment, step = float(event["began"]), moment_of(event), int(event["step"])
        self._step_began = began
        self._until(began, "step")  # what the loop does between two steps
        if self._facts.last_making[step] > event["generation"]:
            self._until(moment, "lost_work", step)
            return
        if self._first_of_generation:
            self._first_of_generation = False
            self._until(moment, "first_step", step)
            return
        self._until(min(moment, began + float(event.get("data_s", 0.0))), "data", step)
        self._until(max(self._at, moment - float(event.get("checkpoint_s", 0.0))), "step", step)
        self._until(moment, "checkpoint", step)

    def _until(self, moment: float, phase: Phase, step: int | None = None) -> None:
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
