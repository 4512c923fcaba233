"""Number of failures and duration of steps in a job, from its event log. The planner computes failure rates from the
numbers of failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hyperpod_ext.errors import ConfigError, NotFoundError, Problem
from hyperpod_ext.planner.rates import Fit, Rates, fit
from hyperpod_ext.runtime.events.event import Events
from hyperpod_ext.runtime.events.of_faults import Fault, Injected, Killed
from hyperpod_ext.runtime.events.of_nodes import NodeLost
from hyperpod_ext.runtime.events.of_training import Go, JobStarted, Step
from hyperpod_ext.runtime.events.reading import read_events

_CORRELATED_S = 10.0
"""Nodes that are lost within `_CORRELATED_S` seconds of each other count as one correlated failure."""


@dataclass(frozen=True, slots=True)
class JobHistory:
    """The failures and durations measured in one job. Durations are in seconds."""

    nodes: int
    wall_s: float
    step_s: float | None
    """Median duration of committed steps in seconds; None if the job made no step."""
    process: Fit
    node: Fit
    correlated: Fit
    recovery_s: float | None
    """Median time in seconds from the detection of a fault until all ranks continued; None without a recovery."""
    rehearsed: int = 0
    """Number of injected faults, which the failure counts leave out."""
    warnings: tuple[str, ...] = ()

    def rates(self) -> Rates:
        """Return the failure rates per node, in failures per second."""
        counts = f"{self.process.events} of processes, {self.node.events} of nodes, {self.correlated.events} of several"
        source = (
            f"the job's own history: {counts}, in {self.wall_s / 3600:.2f} h on {self.nodes} nodes; "
            "a class without failures counts as half a failure"
        )
        if self.rehearsed:
            source += f"; {self.rehearsed} injected fault{'s'[: self.rehearsed != 1]} left out"
        return Rates(self.process.rate, self.node.rate, self.correlated.rate, source)


def read_history(path: Path) -> JobHistory:
    """Return the history of the job in `path`: an events.jsonl, or the run directory of the job.

    Raises:
        NotFoundError: the file does not exist.
        ConfigError: the file cannot be read, or the time from its first to its last event is 0.
    """
    file = path / "events.jsonl" if path.is_dir() else path
    try:
        log = read_events(file, must_exist=True)
    except FileNotFoundError:
        hint = "name an events.jsonl, or the run directory of a job"
        raise NotFoundError(f"there is no file {file}", hint=hint) from None
    except OSError as error:
        raise ConfigError([Problem(f"cannot be read: {error.strerror}", source=str(file))]) from None
    return history_of(log.all_events(), str(file), log.notes)


def history_of(events: Events, source: str, warnings: Sequence[str] = ()) -> JobHistory:
    """Return the history of a job's events.

    Raises:
        ConfigError: the time from the first to the last event is 0.
    """
    wall_s = events.end - min((event.t for event in events), default=0.0)
    if wall_s <= 0:
        message = f"no time passes between its {len(events)} events, so no failure rates can be computed"
        hint = "let the job run for a while, or give rates with --rates or --mtbf-hours"
        raise ConfigError([Problem(message, source=source, hint=hint)])
    started, (faults, lost, rehearsed) = events.first(JobStarted), _unrehearsed(events)
    nodes = (started.nodes if started is not None else 0) or 1
    together = _together(sorted(event.t for event in lost))
    of_nodes = {(event.node, event.t) for event in lost}
    died = sum((fault.node, fault.t) not in of_nodes for fault in faults)
    exposure = wall_s * nodes
    return JobHistory(
        nodes=nodes,
        wall_s=wall_s,
        step_s=median(took) if (took := [step.took for step in events.of(Step)]) else None,
        process=fit(died, exposure),
        node=fit(sum(size == 1 for size in together), exposure),
        correlated=fit(sum(size > 1 for size in together), exposure),
        recovery_s=_recovery_s(events),
        rehearsed=rehearsed,
        warnings=tuple(warnings),
    )


def _unrehearsed(events: Events) -> tuple[list[Fault], list[NodeLost], int]:
    """Return the faults and lost nodes, except injected faults and their consequences; and the number of injected
    faults.

    The first fault of a rank or node after an injection counts as injected, unless the rank made a step in between.
    """
    faults, lost, rehearsed = list[Fault](), list[NodeLost](), 0
    ranks, nodes, lost_at = set[int](), set[int](), dict[int, float]()
    for event in sorted(events, key=lambda event: event.t):
        match event:
            case Killed():
                ranks.add(event.rank)
            case Injected() if event.rank is not None and not event.node_fault:
                ranks.add(event.rank)
            case Injected() if event.node is not None:
                nodes.add(event.node)
            case Step() if event.rank in ranks:
                ranks.discard(event.rank)
            case NodeLost() if event.node in nodes:
                nodes.discard(event.node)
                lost_at[event.node] = event.t
                rehearsed += 1
            case NodeLost():
                lost.append(event)
            case Fault() if event.rank in ranks:
                ranks.discard(event.rank)
                rehearsed += 1
            case Fault() if not (event.late or event.node in nodes or lost_at.get(event.node) == event.t):
                faults.append(event)
    return faults, lost, rehearsed


def _together(moments: Sequence[float]) -> list[int]:
    """Return the number of nodes in each loss: nodes lost within `_CORRELATED_S` seconds count as lost together."""
    sizes: list[int] = []
    for index, moment in enumerate(moments):
        if index and moment - moments[index - 1] <= _CORRELATED_S:
            sizes[-1] += 1
        else:
            sizes.append(1)
    return sizes


def _recovery_s(events: Events) -> float | None:
    took, since = [], None
    for event in events:
        match event:
            case Fault() | NodeLost():
                since = event.t if since is None else since
            case Go() if since is not None:
                took.append(event.t - since)
                since = None
    return median(took) if took else None
