"""Details of a job's report: the time of each rank by phase, shares over time, tiers and traffic. Pure functions.

phases     seconds in each phase, by rank. A rank's phases add up to the wall time
over_time  share of all ranks' time in each phase, in up to 120 equal parts of the job
timeline   in each recovery: spans of each sampled or failed rank, from the fault to the end of the first new step
tiers      how many steps the newest copy in each tier is behind, whenever an agent reports it
traffic    bytes that ranks restored, by source
snapshots  number of snapshots, and the mean time that the training thread waited for a snapshot
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from hyperpod_ext.runtime.events.event import Events
from hyperpod_ext.runtime.events.of_checkpoints import Copying
from hyperpod_ext.runtime.events.of_training import Restored, Step
from hyperpod_ext.runtime.events.phases import PHASES, Span, ranks_of, spans_by_rank, totals

_PARTS = 120
_SHORTEST_S = 0.00005
"""Minimum duration in seconds of a span in a timeline. Times in a timeline have four digits after the point."""
_POINTS = 400
"""Maximum number of points that describe one tier over time. If a tier has more points, every n-th point is kept."""


def breakdown(events: Events, recoveries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields listed at the top of this module. The function also adds `timeline` to each entry of
    `recoveries`.

    `recoveries`: entries whose `t` and `seconds` say when the recovery began and how long it took, and whose `failed`
    names the failed ranks."""
    start, wall, sampled = events.start, events.end - events.start, set(ranks_of(events))
    phases: dict[str, dict[str, float]] = {}
    over_time = OverTime(start, wall)
    for recovery in recoveries:
        recovery["timeline"] = {}
    for rank, found in spans_by_rank(events, also={rank for recovery in recoveries for rank in recovery["failed"]}):
        if rank in sampled:
            phases[str(rank)] = {phase: round(seconds, 4) for phase, seconds in totals(found).items()}
            over_time.add(found)
        for recovery in recoveries:
            if rank in sampled or rank in recovery["failed"]:
                recovery["timeline"][str(rank)] = _window(found, start + recovery["t"], recovery["seconds"])
    return {
        "phases": phases,
        "over_time": over_time.to_json(),
        "tiers": _tiers(events),
        "traffic": _traffic(events),
        "snapshots": _snapshots(events),
    }


class OverTime:
    """Sums the spans of all ranks in each of 120 equal parts of the job."""

    def __init__(self, start: float, wall: float) -> None:
        self._start = start
        self._part = wall / _PARTS
        self._ranks = 0
        self._seconds = {phase: [0.0] * _PARTS for phase in PHASES}

    def add(self, of_rank: Iterable[Span]) -> None:
        """Add one rank's spans to the sums."""
        self._ranks += 1
        for span in of_rank:
            sums = self._seconds[span.phase]
            began, ended = span.began - self._start, span.ended - self._start
            first, last = int(began / self._part), min(int(ended / self._part), _PARTS - 1)
            for index in range(min(first, last), last + 1):
                overlap = min(ended, (index + 1) * self._part) - max(began, index * self._part)
                sums[index] += max(0.0, overlap)

    def to_json(self) -> dict[str, Any]:
        """Return `part_s`, the duration of one part in seconds, and each phase's shares of all ranks' time, from 0 to
        1."""
        if not self._ranks or self._part <= 0:
            return {"part_s": 0.0, "shares": {}}
        total = self._part * self._ranks
        shares = {
            phase: [round(seconds / total, 5) for seconds in sums] for phase, sums in self._seconds.items() if any(sums)
        }
        return {"part_s": round(self._part, 6), "shares": shares}


def _window(found: Sequence[Span], began: float, seconds: float) -> list[list[Any]]:
    """Return `[phase, start, duration]` of each span in a time window, in seconds from `began`. Adjacent spans of the
    same phase are merged."""
    pieces: list[list[Any]] = []
    # bisect, because a month's spans are too many to scan for each recovery
    first = bisect_right(found, began, key=lambda span: span.ended)
    last = bisect_left(found, began + seconds, key=lambda span: span.began)
    for span in found[first:last]:
        left, right = max(span.began, began), min(span.ended, began + seconds)
        if right - left < _SHORTEST_S:
            continue
        if pieces and pieces[-1][0] == span.phase:
            pieces[-1][2] = round(right - began - pieces[-1][1], 4)
        else:
            pieces.append([span.phase, round(left - began, 4), round(right - left, 4)])
    return pieces


def _tiers(events: Events) -> list[dict[str, Any]]:
    """Return, for each node's copies to each tier, how many steps the newest copy was behind the job's newest step,
    over time."""
    newest, points = 0, dict[tuple[str, int], list[list[Any]]]()
    reported: dict[tuple[str, int], Copying] = {}
    for event in events:
        match event:
            case Step():
                newest = max(newest, event.step)
            case Copying():
                reported[event.tier, event.node] = event
                if event.newest_step is not None:
                    behind = max(0, newest - event.newest_step)
                    points.setdefault((event.tier, event.node), []).append([round(event.t - events.start, 4), behind])
    keys = {"tier", "node", "newest_step", "failed", "skipped", "last_error"}
    return [
        {**last.model_dump(include=keys), "behind": _thinned(points.get(place, []))}
        for place, last in sorted(reported.items(), key=lambda item: item[0])
    ]


def _thinned(points: list[list[Any]]) -> list[list[Any]]:
    every = -(-len(points) // _POINTS)
    return points[::every] if points else []


def _traffic(events: Events) -> dict[str, dict[str, int]]:
    """Return the number of restores, the bytes from other nodes and the bytes from the own node, by source."""
    traffic: dict[str, dict[str, int]] = {}
    for event in events.of(Restored):
        sums = traffic.setdefault(event.came_from, {"restores": 0, "bytes_moved": 0, "bytes_local": 0})
        sums["restores"] += 1
        sums["bytes_moved"] += event.bytes_moved
        sums["bytes_local"] += event.bytes_local
    return dict(sorted(traffic.items()))


def _snapshots(events: Events) -> dict[str, float]:
    steps = events.of(Step)
    made, waited = sum(step.snapshot for step in steps), sum(step.checkpoint_s for step in steps)
    return {"count": made, "mean_s": round(waited / made, 6) if made else 0.0}
