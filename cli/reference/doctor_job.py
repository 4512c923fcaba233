"""What a stranger asks first of a job that does not go as expected, answered from what is there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..output import columns

_SEALED = frozenset({"sealed", "replicated", "durable"})
"""States of a snapshot that can be restored."""
Held = dict[str, Any]
"""A tier: `tier`, `every_steps` or `every_s`, `newest_step` that all ranks have there or None, and `error` or None."""


def look_at_job(job: str) -> dict[str, Any]:
    """State, what is saved and held, the last fault, and what the next would lead to.

    Raises:
        NotFoundError: there is no such job, or its files are not on this machine.
    """
    from hyperpod_ext.errors import NotFoundError
    from hyperpod_ext.submit.contract.handle import JobHandle
    from hyperpod_ext.submit.contract.targets import get_target
    from hyperpod_ext.submit.local.store import latest

    from ..checkpoints.location import find_places
    from ..checkpoints.memory import ask_memory
    from ..report.runs import read_result

    handle = JobHandle.parse(job)
    if handle.target != "local":
        hint = f"`hp-ext describe {job}`, and `hp-ext report` of its run folder, show what is known"
        raise NotFoundError(f"the files of {job} are not on this machine", hint=hint)
    status = get_target(handle.target).status(handle)
    submission = latest(handle.name)
    assert submission is not None, "it has a status"
    spec = json.loads(submission.job_file.read_text())
    try:
        result = read_result(handle)
    except NotFoundError:  # it has not begun
        result = {}
    places, _ = find_places(handle.name, None, ())
    durable = {place.tier: _newest_durable(place) for place in places}
    memory = ask_memory(submission)
    held = [_held(tier, memory, durable, spec["nodes"] * spec["workers_per_node"]) for tier in _tiers(spec, places)]
    running = status.state in ("starting", "running", "comparing")
    faults = result.get("faults", [])
    return {
        "job": handle.name,
        "state": status.state,
        "step": status.step,
        "of": status.of,
        "error": status.error,
        "held": held,
        "faults": len(faults),
        "last_fault": faults[-1] if faults else None,
        "next": what_next(spec, held, running, len(faults), len(result.get("nodes_lost", []))),
    }


def _tiers(spec: Mapping[str, Any], places: Sequence[Any]) -> list[tuple[Mapping[str, Any], Any]]:
    """Each tier as the spec has it, and of a durable one what the place is known by."""
    known = iter(place.tier for place in places)
    tiers = spec["checkpoint"]["tiers"]
    return [(tier, next(known, None) if tier["kind"] in ("file", "s3") else None) for tier in tiers]


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
    spec, place = tier
    name = spec.get("path") or spec.get("url") or spec["kind"]
    how_often = {key: spec[key] for key in ("every_steps", "every_s") if spec.get(key) is not None}
    if spec["kind"] in ("file", "s3"):
        newest, error = durable.get(place, (None, "it was not looked at"))
    elif memory is None:
        newest, error = None, "the job does not run: what its memory held is gone"
    else:
        newest = newest_of_all(memory["nodes"], ranks, replica=spec["kind"] == "peer")
        error = "; ".join(f"node {one['node']}: {one['error']}" for one in memory["nodes"] if one["error"]) or None
    return {"tier": name, "kind": spec["kind"], **how_often, "newest_step": newest, "error": error}


def newest_of_all(nodes: Iterable[Mapping[str, Any]], ranks: int, *, replica: bool) -> int | None:
    """Newest step that this memory has of every rank."""
    found: dict[int, set[int]] = {}
    for node in nodes:
        for one in node["snapshots"]:
            if one["replica"] == replica and one["state"] in _SEALED:
                found.setdefault(one["step"], set()).add(one["rank"])
    return max((step for step, its in found.items() if len(its) == ranks), default=None)


def what_next(
    spec: Mapping[str, Any], held: Sequence[Held], running: bool, faults: int, nodes_lost: int
) -> list[tuple[str, str]]:
    """What would come of the next fault, of each kind."""
    restart = spec["restart"]
    newest = {kind: _newest(held, *kinds) for kind, kinds in _SURVIVE.items()}
    again = _from(newest["job"], "it goes on", "it begins anew: no durable tier has a checkpoint")
    if not running:
        return [("it is started again", again)]
    ends = f"the job ends: {faults} faults, and restart.max_restarts is {restart['max_restarts']}"
    spent = faults >= restart["max_restarts"]
    live = "from the state of a live rank that has the same, else "
    process = "the process is replaced; " + live + _from(newest["process"], "all go on", "they begin anew")
    more = spec["nodes"] + spec["spares"] > 1
    node = f"a node is waited for, {restart['node_wait_s']:g} s"
    if spec["spares"]:
        node = "a spare node takes its place"
    node += "; " + live + _from(newest["node"], "all go on", "they begin anew: no other node or tier has a copy")
    if nodes_lost >= restart["max_node_losses"]:
        node = (
            f"the job ends: {nodes_lost} nodes were lost, and restart.max_node_losses is {restart['max_node_losses']}"
        )
    if not more:
        node = "the job ends: it has no other node"
    return [
        ("a process is killed", ends if spent else process),
        ("a node is lost", ends if spent and more else node),
        ("the job is started again", again),
    ]


_SURVIVE: Mapping[str, tuple[str, ...]] = {
    "process": ("memory", "peer", "file", "s3"),
    "node": ("peer", "file", "s3"),
    "job": ("file", "s3"),
}
"""Kinds of tiers that survive the loss of a process, of a node, and of all nodes."""


def _newest(held: Sequence[Held], *kinds: str) -> Held | None:
    there = [one for one in held if one["kind"] in kinds and one["newest_step"] is not None]
    return max(there, key=lambda one: int(one["newest_step"]), default=None)


def _from(newest: Held | None, go_on: str, anew: str) -> str:
    return anew if newest is None else f"{go_on} from step {newest['newest_step']}, which is in {newest['tier']}"


def describe_job(found: Mapping[str, Any]) -> str:
    """The same in words."""
    step = "" if found["step"] is None else f", step {found['step']} of {found['of']}"
    parts = [f"{found['job']}: {found['state']}{step}"]
    if found["error"]:
        parts.append(str(found["error"]["message"]))
    rows = [("SAVED IN", "EVERY", "NEWEST STEP OF ALL RANKS")]
    for one in found["held"]:
        often = f"{one['every_steps']} steps" if "every_steps" in one else f"{one.get('every_s', '-')} s"
        newest = "none" if one["newest_step"] is None else str(one["newest_step"])
        rows.append((one["tier"], often, f"{newest} ({one['error']})" if one["error"] else newest))
    parts.append(columns(rows) if found["held"] else "nothing is saved: there is no tier")
    fault = found["last_fault"]
    if fault is None:
        parts.append("no fault so far")
    else:
        where = f"rank {fault['rank']} on node {fault['node']}, step {fault['step']}"
        parts.append(f"last fault, of {found['faults']}: {where}: {fault['cause']}")
    parts.append("\n".join(f"if {what}: {then}" for what, then in found["next"]))
    return "\n\n".join(parts)
