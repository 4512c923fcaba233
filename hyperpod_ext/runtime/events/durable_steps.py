"""Durable steps in the report: the newest step in each tier, and shards missing when the job ended. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyperpod_ext.runtime.events.event import Events
from hyperpod_ext.runtime.events.of_checkpoints import Copying, FinalSave, LeftOver, Uploaded
from hyperpod_ext.runtime.events.of_training import Go

_MIB = 1 << 20


def durable_steps(events: Events) -> list[dict[str, Any]]:
    """Return the newest step in each durable tier, from the nodes' last reports. The step is None if no step is durable
    in the tier."""
    steps: dict[str, set[int]] = {}
    for event in events:
        match event:
            case Copying() if event.tier != "peer":
                _add(steps, event)
            case Uploaded():
                for tier in event.tiers:
                    _add(steps, tier)
            case Go():  # a restore of this step abandons later steps
                steps = {tier: {step for step in its if step <= event.step} for tier, its in steps.items()}
    return [{"tier": tier, "newest_step": max(its, default=None)} for tier, its in sorted(steps.items())]


def _add(steps: dict[str, set[int]], reported: Copying | LeftOver) -> None:
    its = steps.setdefault(reported.tier, set())
    if reported.newest_step is not None:
        its.add(reported.newest_step)


def left_out(events: Events) -> list[str]:
    """Return one line for each durable tier that does not have the last step of an ended job, with the reason."""
    first, save = events.first(FinalSave), events.last(FinalSave)
    since = Events(events[events.index(first) :]) if first is not None else events
    parts = list({part.node: part for part in since.of(Uploaded)}.values())
    if save is None:
        late = f"was not known within {parts[0].limit_s:g} s" if parts else ""
        return [f"the newest step that all ranks hold {late}, so only due checkpoints are durable"] if parts else []
    lost = sorted({*save.nodes} - {part.node for part in parts})
    if save.step is None:
        if not save.made:
            return []
        return [f"step {save.made} was made last, but no step has snapshots of all ranks on nodes that are alive"]
    lines = []
    if save.step < save.made:
        lines.append(f"step {save.made} was made last, but the newest step with snapshots of all ranks is {save.step}")
    if not parts:
        lines.append(f"step {save.step} may be in no durable tier: {_listed(lost)} did not report an upload")
    newest = {one["tier"]: one["newest_step"] for one in durable_steps(events)}
    for tier in sorted({tier.tier for part in parts for tier in part.tiers}):
        of_nodes = [(part, one) for part in parts for one in part.tiers if one.tier == tier]
        if any(one.arrived for _, one in of_nodes):  # a step is durable when all nodes have uploaded their parts
            continue
        there = "none is durable there" if newest[tier] is None else f"the newest durable step there is {newest[tier]}"
        why = "; ".join([*(_part(part, one) for part, one in of_nodes), *(f"node {node} was lost" for node in lost)])
        lines.append(
            f"step {save.step} is not in {tier}, and {there}: {why}. Started again, the job goes on from its newest "
            "durable step."
        )
    return lines


def _listed(nodes: Sequence[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"


def _part(part: Uploaded, tier: LeftOver) -> str:
    """Return a phrase about the shards that one node did not upload, and the reason."""
    ranks = tier.left_ranks
    shards = f"{len(ranks)} shards" if len(ranks) != 1 else "1 shard"
    whose = f"of {'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}"
    what = f"left out {shards} {whose}, {tier.left_bytes / _MIB:.1f} MiB" if ranks else "waited for other nodes"
    why = " ".join(tier.error.split()) or f"not done within {part.limit_s:g} s"
    return f"node {part.node} {what} ({why})"
