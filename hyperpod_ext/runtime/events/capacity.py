"""Computes from the event log how many nodes a job had over time, and how long each resize took. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hyperpod_ext.runtime.events.event import Event, Events
from hyperpod_ext.runtime.events.of_nodes import (
    AwaitingNode,
    RanksReassigned,
    ResizeAsked,
    ResizeBegun,
    Resized,
    ResizePrepared,
    Resizing,
)
from hyperpod_ext.runtime.events.of_training import Begun, Generation, Go, JobStarted, Restored

_PHASES: dict[str, type[Event]] = {
    "nodes_there": ResizeBegun,
    "workers_ready": ResizePrepared,
    "all_stopped": RanksReassigned,
    "groups_open": Generation,
    "state_there": Go,
}
"""Phases of a resize in order, each with the kind of event that ends it."""


def capacity_of(events: Events) -> dict[str, float]:
    """Return the numbers of `nodes` and `spares` at the job's start, and `missing_node_s`.

    `missing_node_s` is the sum, in seconds, of the times during which each lost node was missing. While the job waited
    for a replacement node, all nodes of the job count as missing. Nodes that an order has removed do not count as
    missing.
    """
    started = events.first(JobStarted)
    nodes, spares = (started.nodes, started.spares) if started is not None else (0, 0)
    now, lost, waiting = nodes, 0, False
    missing, since = 0.0, 0.0
    for event in events:
        if isinstance(event, Resized | AwaitingNode | Generation):
            missing += (now if waiting else lost) * max(0.0, event.t - since)
            since = event.t
        match event:
            case Resized():
                change, now = event.nodes - event.of, event.nodes
                if event.cause in ("lost", "continued") or (change > 0 and lost):
                    lost = max(0, lost - change)
            case AwaitingNode():
                waiting = True
            case Generation():
                waiting = False
    if events:
        missing += (now if waiting else lost) * max(0.0, events[-1].t - since)
    return {"nodes": nodes, "spares": spares, "missing_node_s": round(missing, 3)}


def find_resizes(events: Events) -> list[dict[str, Any]]:
    """Return one entry for each completed resize, with the seconds of each phase."""
    return [_resize(events, index, event) for index, event in enumerate(events) if isinstance(event, Resized)]


def unfinished_resize(events: Events) -> RanksReassigned | None:
    """Return the resize for which ranks have stopped and not made a step since; None if there is none."""
    last = next((event for event in reversed(events) if isinstance(event, RanksReassigned | Resized)), None)
    return last if isinstance(last, RanksReassigned) else None


def orders_accepted(events: Events) -> set[str]:
    """Return the names of the resize orders that the coordinator has accepted."""
    return {event.order for event in events if isinstance(event, Resizing) and event.order}


def _resize(events: Events, index: int, resized: Resized) -> dict[str, Any]:
    keys = {"of", "nodes", "world_size", "generation", "step", "cause", "pause_s", "pids_kept", "local_share"}
    begins = _last(events, index, ResizeAsked if resized.order else RanksReassigned, 0)
    phases: dict[str, float] = {}
    reached, at = events[begins].t, begins
    for phase, kind in _PHASES.items():
        found = _last(events, index, kind, at)
        if found > at:
            phases[phase] = round(events[found].t - reached, 4)
            reached, at = events[found].t, found
    restored = [event for event in events.of(Restored) if event.generation == resized.generation]
    return {
        **resized.model_dump(include=keys),
        "phases": phases,
        "bytes_moved": sum(event.bytes_moved for event in restored),
        "bytes_local": sum(event.bytes_local for event in restored),
        "sources": sorted({event.came_from for event in restored}),
    }


def _last(events: Events, end: int, kind: type[Event], default: int) -> int:
    """Return the index of the last event of this kind before index `end`; `default` if there is none."""
    return next((i for i in range(end - 1, -1, -1) if isinstance(events[i], kind)), default)


# --- steps made while ranks were missing (`restart.policy: continue`) --------------------------------


def find_continued(events: Events, steps: int) -> list[dict[str, Any]]:
    """Return one entry for each period in which the job continued with fewer ranks. `steps`: the job's last step."""
    worlds = [event for event in events.of(Resized) if event.full_size is not None]
    ends = [world.step for world in worlds[1:]] + [steps]
    return [
        _continued(events, world, end)
        for world, end in zip(worlds, ends, strict=False)
        if world.full_size is not None and world.world_size < world.full_size and end > world.step
    ]


def _continued(events: Events, world: Resized, end: int) -> dict[str, Any]:
    begun = [event for event in events.of(Begun) if event.generation == world.generation]
    ordered = bool(begun) and all(event.reproducible for event in begun)
    return {
        "first_step": world.step + 1,
        "last_step": end,
        "ranks": world.world_size,
        "of": world.full_size,
        "pause_s": world.pause_s,
        "samples": world.samples,
        "differs": _what_differs(world, ordered=ordered),
    }


def _what_differs(world: Resized, *, ordered: bool) -> str:
    """Return how steps made while ranks were missing differ from the steps of a job without the fault.

    The result is empty if the steps do not differ, because the remaining ranks share all micro-batches, seeded by
    step."""
    if world.samples == "fewer":
        share = f"{world.world_size} of {world.full_size} ranks' share of the samples"
        return f"each step had {share}, so gradients are means over fewer samples, and weights differ"
    if not ordered:
        return "the same samples, but gradients were summed in another order: weights differ in their last digits"
    return ""


def differences(continued: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each entry of `find_continued` whose steps differ from those of a job without the fault."""
    for one in continued:
        if one["differs"]:
            steps = f"Steps {one['first_step']} to {one['last_step']} were made by {one['ranks']} of {one['of']} ranks"
            yield f"{steps}: {one['differs']}."
