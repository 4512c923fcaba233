"""What to change, from what was measured: each piece of advice names the figure that it follows from. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_FEW = 3
"""Faults: of fewer, no rate is told."""

_SLOW_PHASE = {
    "fault_seen": "a lower `restart.hang.floor_s`, if hangs were among the faults, finds them sooner",
    "survivors_freed": "look at what keeps ranks from leaving: `hp-ext logs` shows those that were ended for it",
    "new_member": "put what the script imports into `preload`, or keep a spare node",
    "groups_back": "groups are opened anew by name: fewer of them open sooner",
    "state_back": "a nearer tier: memory on every step, or a `peer` tier for the loss of nodes",
    "first_new_step": "look at what the training function does before its first step, such as compiling",
}


def advise(report: Mapping[str, Any]) -> list[str]:
    """Sentences, the most costly thing first; one at least."""
    found = [*_lost_steps(report), *_recoveries(report["recoveries"]), *_waits(report), *_tiers(report)]
    found += _interval(report)
    return [text for _, text in sorted(found, reverse=True)] or ["Nothing: no figure of this run asks for a change."]


def _lost_steps(report: Mapping[str, Any]) -> list[tuple[float, str]]:
    lost = report["steps_lost"]
    if not lost:
        return []
    seconds = _sums(report).get("lost_work", 0.0) / max(1, report["world_size"])
    text = f"{lost} steps were lost to faults ({seconds:.2f} s of each rank): let the first tier have every step."
    return [(seconds, text)]


def _recoveries(recoveries: Sequence[Mapping[str, Any]]) -> list[tuple[float, str]]:
    sums: dict[str, float] = {}
    for recovery in recoveries:
        for phase, seconds in recovery["phases"].items():
            sums[phase] = sums.get(phase, 0.0) + (seconds or 0.0)
    total = sum(sums.values())
    if not total:
        return []
    worst = max(sums, key=lambda phase: sums[phase])
    share, name = 100 * sums[worst] / total, worst.replace("_", " ")
    how = f"{total / len(recoveries):.3f} s a recovery, {share:.0f} % of it in `{name}`"
    slowest = max(recoveries, key=lambda recovery: float(recovery["seconds"]))
    if len(recoveries) > 1 and slowest["seconds"] > total / 2:
        fault = slowest["fault"]
        how += f"; {slowest['seconds']:.2f} s in one of them, rank {fault['rank']} in step {fault['step']}"
    return [(sums[worst], f"{how}: {_SLOW_PHASE.get(worst, 'look at the timelines')}.")]


def _waits(report: Mapping[str, Any]) -> list[tuple[float, str]]:
    sums = _sums(report)
    ranks, wall = max(1, len(report.get("phases", {}))), report["seconds"].get("wall") or 0.0
    if not wall:
        return []
    found = []
    for phase, least, what in (
        ("data", 0.05, "for data: prefetch, or more loader workers"),
        ("checkpoint", 0.01, "for snapshots: let them overlap with the next step, or make them less often"),
        ("startup", 0.20, "before the first step: nothing to change in a long job; `preload` helps a short one"),
    ):
        seconds = sums.get(phase, 0.0) / ranks
        if seconds > least * wall:
            found.append((seconds, f"Each rank waited {seconds:.2f} s ({100 * seconds / wall:.0f} %) {what}."))
    return found


def _tiers(report: Mapping[str, Any]) -> list[tuple[float, str]]:
    return [
        (0.0, f"{tier['failed']} copies from node {tier['node']} to {tier['tier']} failed: {tier['last_error']}.")
        for tier in report.get("tiers", [])
        if tier["failed"]
    ]


def _interval(report: Mapping[str, Any]) -> list[tuple[float, str]]:
    """The planner's interval for the snapshots of this run, where it differs from every step."""
    from hyperpod_ext.planner.intervals import best_interval

    snapshots, faults = report.get("snapshots") or {}, len(report.get("faults", []))
    steps, wall = report["steps"], report["seconds"].get("wall") or 0.0
    kept = report["seconds"].get("steps") or 0.0
    if faults < _FEW or not snapshots.get("count") or not steps or not wall or not kept:
        return []
    step_s, mtbf_s = kept / steps, wall / faults
    best = max(1, round(best_interval(snapshots["mean_s"], mtbf_s) / step_s))
    every = "every step" if best == 1 else f"every {best} steps"
    cost = f"a fault every {mtbf_s:.1f} s and {1000 * snapshots['mean_s']:.2f} ms of waiting for a snapshot"
    text = f"With {cost}, a snapshot {every} is the planner's best for the tier that recoveries come from."
    return [(0.0, text)]


def _sums(report: Mapping[str, Any]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for of_rank in report.get("phases", {}).values():
        for phase, seconds in of_rank.items():
            sums[phase] = sums.get(phase, 0.0) + seconds
    return sums
