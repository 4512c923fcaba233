"""Diagnoses a local job: its state, its checkpoints, its last fault, and the expected outcome of the next fault."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..output import columns, count

if TYPE_CHECKING:
    from hyperpod_ext.runtime.events.event import Events

    from .next_fault import Held

_ABOUT_FAULTS = frozenset({"lost-steps", "hangs", "nearer-tier", "spare-needed", "bad-node"})
"""Names of the advice rules that are about faults."""

_SEALED = frozenset({"sealed", "replicated", "durable"})
"""States of snapshots from which ranks can be restored."""


def look_at_job(job: str) -> dict[str, Any]:
    """Return the state of a job, its checkpoints, its last fault, and the expected outcome of its next fault.

    Raises:
        NotFoundError: the job does not exist, or its files are not on this machine.
    """
    from hyperpod_ext.errors import NotFoundError
    from hyperpod_ext.jobs.contract.handle import JobHandle
    from hyperpod_ext.jobs.contract.targets import get_target
    from hyperpod_ext.jobs.local.store import latest

    from ..checkpoints.location import find_places
    from ..checkpoints.memory import ask_memory
    from ..job_events import nodes_in, read_events_of
    from ..report.runs import read_result
    from .next_fault import budgets_left, earlier_faults, what_next

    handle = JobHandle.parse(job)
    if handle.target != "local":
        hint = f"`hp-ext describe {job}`, and `hp-ext report` of its run folder, show more"
        raise NotFoundError(f"the files of {job} are not on this machine", hint=hint)
    status = get_target(handle.target).status(handle)
    submission = latest(handle.name)
    assert submission is not None, "a job with a status has a submission"
    spec = submission.read_job().model_dump(mode="json")
    try:
        result = read_result(handle)
    except NotFoundError:  # a job that has not begun has no result
        result = {}
    events = read_events_of(status.folder)
    places, _ = find_places(handle.name, None, ())
    durable = {place.tier: _newest_durable(place) for place in places}
    memory = ask_memory(submission)
    ranks = (nodes_in(events).size or spec["nodes"]) * spec["workers_per_node"]
    held = [_held(tier, memory, durable, ranks) for tier in _tiers(spec, places)]
    running = status.state in ("starting", "running", "comparing")
    return {
        "job": handle.name,
        "state": status.state,
        "step": status.step,
        "of": status.of,
        "error": status.error,
        "kept": what_is_kept(events),
        "held": held,
        "faults": len(earlier_faults(events)),
        "last_fault": the_last_fault(events, result),
        "budgets": budgets_left(spec, events, time.monotonic()),
        "next": what_next(spec, held, running, events, time.monotonic()),
    }


def what_is_kept(events: Events) -> dict[str, Any]:
    """Return the objects that the job's snapshots contain, and the objects that change between steps but are in no
    snapshot."""
    from hyperpod_ext.runtime.events.of_training import Kept
    from hyperpod_ext.runtime.events.report import in_no_snapshot

    kept = events.last(Kept)
    return {
        "objects": dict(kept.objects) if kept is not None else None,
        "left_out": list(kept.left_out) if kept is not None else [],
        "in_no_snapshot": in_no_snapshot(events),
    }


def the_last_fault(events: Events, result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the newest fault of the job as JSON, with advice; None if there was no fault."""
    from hyperpod_ext.planner.advice import advise

    from ..report.last_fault import last_fault

    if (fault := last_fault(events)) is None:
        return None
    error = result.get("error") or {}
    if not fault.recovered and error.get("hint"):
        to_do = [str(error["hint"])]
    else:
        to_do = [advice.text for advice in advise(result) if advice.rule in _ABOUT_FAULTS] if "phases" in result else []
    return {**asdict(fault), "to_do": to_do}


def _tiers(spec: Mapping[str, Any], places: Sequence[Any]) -> list[tuple[Mapping[str, Any], Any]]:
    """Return each tier in the job's spec as JSON, together with the tier's model. The model is None if the tier is not
    a shared durable tier."""
    known = {place.tier.kind: place.tier for place in places if place.tier is not None}
    return [(tier, known.get(tier["kind"])) for tier in spec["checkpoint"]["tiers"]]


def _newest_durable(place: Any) -> tuple[int | None, str | None]:
    from hyperpod_ext.errors import HyperpodExtError

    try:
        seen = place.inventory(place.secret(None), lenient=True).seen
    except HyperpodExtError as error:
        return None, error.message
    return max((one.found.step for one in seen if one.state == "complete"), default=None), None


def _held(
    tier: tuple[Mapping[str, Any], Any], memory: Mapping[str, Any] | None, durable: Mapping[Any, Any], ranks: int
) -> Held:
    from hyperpod_ext.config.checkpoint import DURABLE

    spec, place = tier
    name = spec.get("path") or spec.get("uri") or spec["kind"]
    seconds = spec.get("every_seconds")
    how_often = {"every_steps": spec["every_steps"]} if seconds is None else {"every_s": seconds}
    if spec["kind"] in DURABLE:
        newest, error = durable.get(place, (None, "tiers on the nodes' own disks are not read"))
    elif memory is None:
        newest, error = None, "the job is not running, so the snapshots in its memory are lost"
    else:
        newest = newest_of_all(
            memory["nodes"], ranks, replica=spec["kind"] == "peer", parity=spec.get("parity") is not None
        )
        error = "; ".join(f"node {one['node']}: {one['error']}" for one in memory["nodes"] if one["error"]) or None
    return {"tier": name, "kind": spec["kind"], **how_often, "newest_step": newest, "error": error}


def newest_of_all(nodes: Iterable[Mapping[str, Any]], ranks: int, *, replica: bool, parity: bool = False) -> int | None:
    """Return the newest step for which the nodes' memory contains every rank's snapshot, or with `parity` every rank's
    parity data. None if no step is complete.

    Args:
        nodes: content of each node's memory, as `ask_memory` returns it.
        ranks: number of ranks in the job.
        replica: whether to count copies of other nodes' snapshots instead of the nodes' own snapshots.
    """
    found: dict[int, set[int]] = {}
    for node in nodes:
        for one in node.get("pieces", ()) if parity else ():
            found.setdefault(one["step"], set()).add(one["rank"])
        for one in node["snapshots"] if not parity else ():
            if one["replica"] == replica and one["state"] in _SEALED:
                found.setdefault(one["step"], set()).add(one["rank"])
    return max((step for step, its in found.items() if len(its) == ranks), default=None)


def describe_job(found: Mapping[str, Any]) -> str:
    """Return the diagnosis of a job as text."""
    step = "" if found["step"] is None else f", step {found['step']} of {found['of']}"
    parts = [f"{found['job']}: {found['state']}{step}"]
    if found["error"]:
        parts.append(str(found["error"]["message"]))
    rows = [("SAVED IN", "EVERY", "NEWEST STEP OF ALL RANKS")]
    for one in found["held"]:
        often = count(one["every_steps"], "step") if "every_steps" in one else f"{one.get('every_s', '-')} s"
        newest = "none" if one["newest_step"] is None else str(one["newest_step"])
        rows.append((one["tier"], often, f"{newest} ({one['error']})" if one["error"] else newest))
    parts.append(columns(rows) if found["held"] else "nothing is saved: the job has no tier")
    parts += ["\n".join(_kept_lines(found["kept"])), "\n".join(_fault_lines(found)), "\n".join(_budget_lines(found))]
    parts.append("\n".join(f"if {what}: {then}" for what, then in found["next"]))
    return "\n\n".join(part for part in parts if part)


def _kept_lines(kept: Mapping[str, Any]) -> Iterator[str]:
    if kept["objects"] is not None:
        yield "in each snapshot: " + (_named(kept["objects"]) or "nothing was passed to run.restore")
    if kept["left_out"]:
        yield f"left out by the script (run.leave_out): {', '.join(kept['left_out'])}"
    for name in kept["in_no_snapshot"]:
        yield f"changes between steps, but is in no snapshot: {name}"


def _named(objects: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in objects.items())


def _fault_lines(found: Mapping[str, Any]) -> Iterator[str]:
    fault = found["last_fault"]
    if fault is None:
        yield "no fault so far"
        return
    yield f"last fault, of {found['faults']}: {fault['cause']}" if found["faults"] else f"last fault: {fault['cause']}"
    yield from (f"  then: {each}" for each in fault["chain"])
    yield from (f"  tried: {each}" for each in fault["tried"])
    yield f"  outcome: {fault['outcome']}"
    yield from (f"  to do: {each}" for each in fault["to_do"])


def _budget_lines(found: Mapping[str, Any]) -> Iterator[str]:
    left = found["budgets"]
    if not any(what == "a process is killed" for what, _ in found["next"]):  # a job that has ended has no next fault
        return
    parts = [f"{left['restarts']} of {left['max_restarts']} faults (restart.max_restarts)"]
    if left["restarts_in_window"] is not None:
        parts.append(f"{left['restarts_in_window']} within {left['window_s']:g} s (restart.max_restarts_in_window)")
    parts.append(f"{left['node_losses']} of {left['max_node_losses']} lost nodes (restart.max_node_losses)")
    yield f"the job still recovers from {', '.join(parts)}; idle spares: {left['spares']}"
