"""What each change of the number of nodes took: from the event log to the job's report. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Event = dict[str, Any]

_PHASES = {
    "nodes_there": "resize_begun",
    "newcomers_ready": "resize_prepared",
    "all_stopped": "world",
    "groups_open": "generation",
    "state_there": "go",
}
"""What comes one after the other, and the event that it ends with."""


def find_resizes(events: Sequence[Event]) -> list[dict[str, Any]]:
    """One entry for each world that the job went on as, with the seconds of each phase that led to it."""
    return [_resize(events, index) for index, event in enumerate(events) if event["event"] == "resized"]


def _resize(events: Sequence[Event], index: int) -> dict[str, Any]:
    resized = events[index]
    keys = ("of", "nodes", "world_size", "generation", "step", "cause", "pause_s", "pids_kept", "local_share")
    begins = _last(events, index, "resize_asked" if resized["order"] else "world", 0)
    phases: dict[str, float] = {}
    reached, at = events[begins]["t"], begins
    for phase, event in _PHASES.items():
        found = _last(events, index, event, at)
        if found > at:
            phases[phase] = round(events[found]["t"] - reached, 4)
            reached, at = events[found]["t"], found
    restored = [e for e in events if e["event"] == "restored" and e["generation"] == resized["generation"]]
    return {
        **{key: resized[key] for key in keys},
        "phases": phases,
        "bytes_moved": sum(e.get("bytes_moved", 0) for e in restored),
        "bytes_local": sum(e.get("bytes_local", 0) for e in restored),
        "sources": sorted({e["source"] for e in restored}),
    }


def _last(events: Sequence[Event], end: int, kind: str, default: int) -> int:
    """Index of the last event of a kind before `end`."""
    return next((i for i in range(end - 1, -1, -1) if events[i]["event"] == kind), default)
