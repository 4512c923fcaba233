"""The event log of a job, found by its folder: what it has so far, and the nodes that it has now."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyperpod_ext.jobs.contract.resize import JobNodes
    from hyperpod_ext.runtime.events.event import Events
    from hyperpod_ext.runtime.events.reading import LogRead


def events_in(folder: str) -> Path | None:
    """The event log of the newest start of a job whose files are in `folder`; None: it has none there."""
    from hyperpod_ext.jobs.slurm.runs import starts

    if not folder:
        return None
    begun = [Path(folder) / "main", *reversed(starts(Path(folder)))]
    return next((start / "events.jsonl" for start in begun if (start / "events.jsonl").exists()), None)


def read_events_of(folder: str) -> Events:
    """What the newest start of a job has logged so far, in the order of time; none where it has no log."""
    from hyperpod_ext.runtime.events.event import Events
    from hyperpod_ext.runtime.events.reading import read_events

    file = events_in(folder)
    return Events() if file is None else in_time(read_events(file))


def nodes_in(events: Events) -> JobNodes:
    """Nodes of a job after these events; none of both where they do not tell."""
    from hyperpod_ext.jobs.contract.resize import nodes_of_job
    from hyperpod_ext.runtime.events.of_nodes import NodeJoined, NodeLeft, NodeLost, RanksReassigned
    from hyperpod_ext.runtime.events.of_training import JobStarted

    of_nodes = (JobStarted, RanksReassigned, NodeJoined, NodeLeft, NodeLost)
    return nodes_of_job(event.model_dump() for event in events if isinstance(event, of_nodes))


def in_time(log: LogRead) -> Events:
    """All events of a log, in the order of time."""
    from hyperpod_ext.runtime.events.event import Events

    return Events(sorted(log.all_events(), key=lambda event: event.t))
