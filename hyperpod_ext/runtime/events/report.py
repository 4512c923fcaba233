"""Where every second went: from the event log to the job's report. Pure.

Goodput is the share of wall time, from the start of the agents to the end of the job, that was spent on
steps which were kept. A step that a fault interrupted counts from its second, whole making only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hyperpod_ext.runtime.events.breakdown import breakdown
from hyperpod_ext.runtime.events.capacity import capacity_of
from hyperpod_ext.runtime.events.durable_steps import durable_steps, left_out
from hyperpod_ext.runtime.events.resizes import find_resizes

Event = dict[str, Any]
"""`t` (seconds of the machine's monotonic clock), `event`, and fields of its kind."""


def make_report(events: Sequence[Event], *, state: str, error: Any, world_size: int) -> dict[str, Any]:
    """The job's report, as `report.json` has it."""
    recoveries = find_recoveries(events, world_size)
    intervals = kept_steps(events)
    seconds = account(events, intervals, recoveries)
    return {
        "state": state,
        "error": error,
        "world_size": world_size,
        "generations": max((e["generation"] for e in events if e["event"] == "generation"), default=0),
        "steps": max(intervals, default=0),
        "steps_lost": sum(recovery["steps_lost"] for recovery in recoveries),
        "goodput": round(seconds["steps"] / seconds["wall"], 4) if seconds["wall"] else 0.0,
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "recoveries": recoveries,
        "resizes": find_resizes(events),
        "nodes_lost": sorted({e["node"] for e in events if e["event"] == "node_lost"}),
        "faults": [{"t": round(e["t"] - events[0]["t"], 4), **_typed(e)} for e in events if e["event"] == "fault"],
        "skipped": sorted({e["step"] for e in events if e["event"] == "skipped"}),
        "losses": {str(step): value for step, value in _losses(events).items()},
        "metrics": _metrics(events),
        "weights": _weights(events, world_size),
        "capacity": capacity_of(events),
        "pids": {str(e["rank"]): e["pid"] for e in events if e["event"] == "joined"},
        **breakdown(events, recoveries),
        "durable": durable_steps(events),
        "warnings": left_out(events),
    }


def kept_steps(events: Iterable[Event]) -> dict[int, tuple[float, float]]:
    """When each kept step began and ended, over all ranks; of a step made twice, its last making."""
    intervals: dict[int, tuple[int, float, float]] = {}
    for event in events:
        if event["event"] != "step":
            continue
        step, generation = event["step"], event["generation"]
        known = intervals.get(step)
        if known is None or generation > known[0]:
            intervals[step] = (generation, event["began"], event["t"])
        elif generation == known[0]:
            intervals[step] = (generation, min(known[1], event["began"]), max(known[2], event["t"]))
    return {step: (began, ended) for step, (_, began, ended) in sorted(intervals.items())}


def committed_step(events: Iterable[Event], world_size: int) -> int:
    """Newest step that every rank reported as done, or restored, in one generation."""
    ranks: dict[tuple[int, int], set[int]] = {}
    for event in events:
        if event["event"] in ("step", "begun"):
            ranks.setdefault((event["step"], event["generation"]), set()).add(event["rank"])
    return max((step for (step, _), reported in ranks.items() if len(reported) == world_size), default=0)


def account(
    events: Sequence[Event], intervals: dict[int, tuple[float, float]], recoveries: Sequence[dict[str, Any]]
) -> dict[str, float]:
    """Seconds of wall time by what they went into; the parts add up to `wall`."""
    if not events:
        return {"startup": 0.0, "steps": 0.0, "recovery": 0.0, "other": 0.0, "wall": 0.0}
    start, end = events[0]["t"], events[-1]["t"]
    began = min((e["t"] for e in events if e["event"] == "begun"), default=end)
    steps, covered = 0.0, start
    for step_began, step_ended in intervals.values():
        steps += max(0.0, step_ended - max(step_began, covered))
        covered = max(covered, step_ended)
    # the first new step of a recovery is a kept step: count it there, once
    recovery = sum(
        sum(v for k, v in r["phases"].items() if v is not None and k != "first_new_step") for r in recoveries
    )
    wall, startup = end - start, began - start
    return {
        "startup": startup,
        "steps": steps,
        "recovery": recovery,
        "other": max(0.0, wall - startup - steps - recovery),
        "wall": wall,
    }


def find_recoveries(events: Sequence[Event], world_size: int) -> list[dict[str, Any]]:
    """One entry for each generation after the first, with the phases that led to it, in seconds."""
    starts = [index for index, event in enumerate(events) if event["event"] == "generation"]
    bounds = [*starts, len(events)]
    recoveries = []
    for before, begin, after in zip(bounds, bounds[1:], bounds[2:], strict=False):
        leaving, coming = events[before:begin], events[begin:after]
        if faults := _of(leaving, "fault"):
            recoveries.append(_recovery(events[:begin], leaving, coming, faults, world_size))
    return recoveries


def _recovery(
    past: Sequence[Event], leaving: Sequence[Event], coming: Sequence[Event], faults: list[Event], world_size: int
) -> dict[str, Any]:
    # the first choice may have been refused; what everybody went on from is the last word
    fault, resumed = faults[0], next((e["step"] for e in reversed(_of(coming, "go"))), coming[0]["step"])
    begun = _of(past, "generation")[-1:]
    committed = committed_step(past, begun[0].get("world_size", world_size) if begun else world_size)
    inflicted = [*_of(leaving, "killed"), *_of(leaving, "injected")]
    failed = {f["rank"] for f in faults}  # who saw it first need not be whom it struck
    struck = next((e["t"] for e in inflicted if e.get("rank") in failed and e["t"] <= fault["t"]), None)
    gone = {f["rank"] for f in faults if f["died"]}
    first_new = [e["t"] for e in _of(coming, "step") if e["step"] == resumed + 1]
    milestones = {
        "fault_seen": fault["t"],
        "survivors_freed": _last(leaving, "freed", after=fault["t"]),
        "new_member": _last(leaving, "joined", after=fault["t"]),
        "groups_back": _last(coming, "groups_open"),
        "state_back": _last(coming, "go"),
        "first_new_step": max(first_new, default=None),
    }
    phases: dict[str, float | None] = {}
    reached = struck if struck is not None else fault["t"]
    begin = reached
    for name, moment in milestones.items():
        if moment is None:
            phases[name] = None
            continue
        phases[name] = round(max(0.0, moment - reached), 4)  # what went on beside an earlier phase cost nothing
        reached = max(reached, moment)
    if struck is None:
        phases["fault_seen"] = None  # nobody knows when it struck
    restored = {e["rank"]: e["source"] for e in _of(coming, "restored")}
    moved = [e["t"] for e in leaving if e["event"] in ("step", "begun") and e["t"] <= fault["t"]]
    return {
        "generation": coming[0]["generation"],
        "t": round(begin - past[0]["t"], 4),
        "fault": _typed(fault),
        "rung": fault.get("rung", ""),
        "silent_s": round(fault["t"] - max(moved), 4) if moved else None,
        "resumed_step": resumed,
        "steps_lost": max(0, committed - resumed),
        "source": restored.get(fault["rank"], ""),
        "survivor_pids_kept": _same_pids(past, leaving, _survivors(leaving, world_size, gone), fault["t"]),
        "phases": phases,
        "seconds": round(reached - begin, 4),
    }


def _typed(fault: Event) -> dict[str, Any]:
    """A fault as the report has it. `phase` is empty where the process could not tell."""
    known = {key: fault[key] for key in ("rank", "node", "step", "cause")}
    return {**known, "phase": fault.get("phase", ""), "kind": fault.get("kind", "")}


def _of(events: Iterable[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def _last(events: Iterable[Event], kind: str, *, after: float = 0.0) -> float | None:
    return max((e["t"] for e in _of(events, kind) if e["t"] >= after), default=None)


def _survivors(leaving: Sequence[Event], world_size: int, gone: set[int]) -> dict[int, int]:
    """New rank of each rank whose process stays."""
    if worlds := _of(leaving, "world"):
        return {int(rank): now for rank, now in worlds[-1]["moved"].items()}
    return {rank: rank for rank in set(range(world_size)) - gone}


def _same_pids(past: Sequence[Event], leaving: Sequence[Event], survivors: dict[int, int], fault_t: float) -> bool:
    """Whether every survivor joined with the process id it had before the fault."""
    before = {e["rank"]: e["pid"] for e in _of(past, "joined") if e["t"] < fault_t}
    now = {e["rank"]: e["pid"] for e in _of(leaving, "joined") if e["t"] >= fault_t}
    return all(before.get(rank) == now.get(moved) for rank, moved in survivors.items())


def _losses(events: Iterable[Event]) -> dict[int, float | None]:
    """Loss of each step: of its last making, by the lowest rank that reported it."""
    best: dict[int, tuple[int, int, float | None]] = {}
    for event in events:
        if event["event"] == "step" and "loss" in event:
            entry = (-event["generation"], event["rank"], event["loss"])
            best[event["step"]] = min(best.get(event["step"], entry), entry, key=lambda known: known[:2])
    return {step: loss for step, (_, _, loss) in sorted(best.items())}


def _metrics(events: Iterable[Event]) -> dict[str, float | None]:
    """Numbers logged outside of steps; the last word counts."""
    metrics: dict[str, float | None] = {}
    for event in events:
        if event["event"] == "metric":
            metrics |= {k: v for k, v in event.items() if k not in ("t", "event", "rank", "generation", "node")}
    return metrics


def _weights(events: Iterable[Event], world_size: int) -> str:
    """Digests of the final state of all ranks, as one; empty unless every rank reported."""
    digests = {event["rank"]: event["digest"] for event in events if event["event"] == "done"}
    if len(digests) < world_size or not all(digests.values()):
        return ""
    if len(set(digests.values())) == 1:
        return str(digests[0])
    return "/".join(str(digests[rank]) for rank in sorted(digests))
