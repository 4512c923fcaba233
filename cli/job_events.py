"""Reads the event log in a job's folder, and the job's present nodes from the log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyperpod_ext.jobs.contract.resize import JobNodes
    from hyperpod_ext.runtime.events.event import Events
    from hyperpod_ext.runtime.events.reading import LogRead


def events_in(folder: str) -> Path | None:
    """Return the path of the event log of the job's newest start; None if the folder contains no event log."""
    from hyperpod_ext.jobs.slurm.runs import starts

    if not folder:
        return None
    begun = [Path(folder) / "main", *reversed(starts(Path(folder)))]
    return next((start / "events.jsonl" for start in begun if (start / "events.jsonl").exists()), None)


def read_events_of(folder: str) -> Events:
    """Return the events of the job's newest start, sorted by time. Empty if the folder contains no event log."""
    from hyperpod_ext.runtime.events.event import Events
    from hyperpod_ext.runtime.events.reading import read_events

    file = events_in(folder)
    return Events() if file is None else in_time(read_events(file))


def nodes_in(events: Events) -> JobNodes:
    """Return the nodes of a job after all of the events in `events`. Return empty JobNodes if no event names a node."""
    from hyperpod_ext.jobs.contract.resize import nodes_of_job
    from hyperpod_ext.runtime.events.of_nodes import NodeJoined, NodeLeft, NodeLost, RanksReassigned
    from hyperpod_ext.runtime.events.of_training import JobStarted

    of_nodes = (JobStarted, RanksReassigned, NodeJoined, NodeLeft, NodeLost)
    return nodes_of_job(event.model_dump() for event in events if isinstance(event, of_nodes))


def in_time(log: LogRead) -> Events:
    """Return all events of an event log, sorted by time."""
    from hyperpod_ext.runtime.events.event import Events

    return Events(sorted(log.all_events(), key=lambda event: event.t))
