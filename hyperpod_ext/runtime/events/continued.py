"""Steps that a job made while ranks were missing (`restart.policy: continue`), and what differs of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hyperpod_ext.runtime.events.event import Events
from hyperpod_ext.runtime.events.of_nodes import Resized
from hyperpod_ext.runtime.events.of_training import Begun


def find_continued(events: Events, steps: int) -> list[dict[str, Any]]:
    """One entry for each time that the job went on with fewer ranks than it has. `steps`: that it has made."""
    worlds = [event for event in events.of(Resized) if event.whole_size is not None]
    ends = [world.step for world in worlds[1:]] + [steps]
    return [
        _continued(events, world, end)
        for world, end in zip(worlds, ends, strict=False)
        if world.whole_size is not None and world.world_size < world.whole_size and end > world.step
    ]


def _continued(events: Events, world: Resized, end: int) -> dict[str, Any]:
    begun = [event for event in events.of(Begun) if event.generation == world.generation]
    ordered = bool(begun) and all(event.reproducible for event in begun)
    return {
        "first_step": world.step + 1,
        "last_step": end,
        "ranks": world.world_size,
        "of": world.whole_size,
        "pause_s": world.pause_s,
        "samples": world.samples,
        "differs": _what_differs(world, ordered=ordered),
    }


def _what_differs(world: Resized, *, ordered: bool) -> str:
    """From a run without the fault; empty: nothing, where micro-batches are shared and seeded by the step."""
    if world.samples == "fewer":
        share = f"{world.world_size} of {world.whole_size} ranks' share of the samples"
        return f"each step had {share}, so gradients are means over fewer, and weights are others"
    if not ordered:
        return "the same samples, their gradients summed in another order: weights differ in their last digits"
    return ""


def differences(continued: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What a reader of the report must know, in words."""
    for one in continued:
        if one["differs"]:
            steps = f"Steps {one['first_step']} to {one['last_step']} were made by {one['ranks']} of {one['of']} ranks"
            yield f"{steps}: {one['differs']}."
