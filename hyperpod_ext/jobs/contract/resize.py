"""Requests to resize a running job or to move its ranks: check, write to the run folder, and wait for the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.resize import LEFT, RESIZES, Order, allowed_sizes, has_already
from hyperpod_ext.counts import count
from hyperpod_ext.errors import ConflictError, HyperpodExtError, Problem, WaitTimeoutError
from hyperpod_ext.files import make_private_folder, write_atomically
from hyperpod_ext.jobs.contract.run_files import Tail, read_event

_TICK_S = 0.1
_LEAVE_S = 30.0
"""Seconds for a departing node's processes to end after the node has handed over its shards."""


@dataclass(frozen=True, slots=True)
class JobNodes:
    """A job's nodes according to its event log."""

    size: int
    """Number of nodes with ranks."""
    members: frozenset[int]
    """Numbers of all present nodes, including spares and leaving nodes."""


def refusal(job: JobConfig, nodes: int) -> Problem | None:
    """Return why a job cannot run on `nodes` nodes; None if the job can. Pure."""
    if job.elastic is None:
        hint = "set `elastic` with min_nodes and max_nodes in the spec of the job, and start the job again"
        return Problem(f"{job.name} runs on exactly {count(job.nodes, 'node')}", source="--nodes", hint=hint)
    sizes = allowed_sizes(job.elastic, job.nodes, job.workers_per_node, job.global_batch_size)
    if nodes in sizes:
        return None
    allowed = allowed_sizes(job.elastic, job.nodes, job.workers_per_node, None)
    if nodes in allowed:
        ranks = nodes * job.workers_per_node
        message = f"the job's global batch of {job.global_batch_size} cannot be divided evenly among {ranks} ranks"
    elif nodes < job.elastic.min_nodes:
        message = f"{nodes} is below elastic.min_nodes ({job.elastic.min_nodes})"
    elif nodes > job.elastic.max_nodes:
        message = f"{nodes} is above elastic.max_nodes ({job.elastic.max_nodes})"
    else:
        message = f"{nodes} is not an allowed number of nodes"
    return Problem(message, source="--nodes", hint=f"{job.name} can run on {', '.join(map(str, sizes))}")


def refusal_to_move(job: JobConfig, node: int) -> Problem | None:
    """Return why the spec forbids moving the ranks of a node to a spare; None if the spec allows it. Pure."""
    if not job.spares and job.elastic is None:
        hint = "set `spares: 1` in the spec of the job, and start the job again"
        return Problem(f"{job.name} has no spares that ranks could move to", source="--node", hint=hint)
    most = max(job.nodes, job.elastic.max_nodes if job.elastic else 0) + job.spares
    if node < most:
        return None
    return Problem(f"{job.name} has no node {node}", source="--node", hint=f"the job's nodes are 0 to {most - 1}")


def nodes_of_job(events: Iterable[Mapping[str, Any]]) -> JobNodes:
    """Return the job's nodes after the last of `events`, which come from its event log. Pure."""
    size, members = 0, set[int]()
    for event in events:
        match event:
            case {"event": "job_started" | "world", "nodes": int(nodes)}:
                size = nodes
            case {"event": "node_joined", "node": int(node)}:
                members.add(node)
            case {"event": "node_left" | "node_lost", "node": int(node)}:
                members.discard(node)
    return JobNodes(size, frozenset(members))


def new_name() -> str:
    """Return a new name for a request, made from the current time. Sorted names are in the order of the requests."""
    return f"{time.time_ns():020d}"


def leave_order(run_dir: Path, name: str, order: Order) -> None:
    """Write a request to the folder that the job's coordinator reads."""
    folder = run_dir / RESIZES
    make_private_folder(folder)
    write_atomically(folder / f"{name}.json", order.model_dump_json(exclude_defaults=True) + "\n")


def outcome(
    job: str,
    events: Tail,
    name: str,
    ended: Callable[[], str],
    timeout_s: float | None = None,
    unasked: int | None = None,
) -> dict[str, Any]:
    """Wait until the coordinator has carried out request `name` of `job`; return the coordinator's event about it.

    Args:
        ended: returns why the request can no longer be carried out; an empty text as long as the request can succeed.
        timeout_s: maximum seconds to wait; None waits without a limit.
        unasked: requested number of nodes. If the job has resized itself to `unasked` nodes, a refused request counts
            as carried out. If `unasked` is None, a refused request is always an error.

    Raises:
        ConflictError: the coordinator refused the request, or can no longer carry the request out.
        WaitTimeoutError: the request takes longer than `timeout_s`.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    newest: dict[str, Any] | None = None
    while True:
        why = ended()  # call `ended` before reading events, so that no event is missed
        for line in events.lines():
            event = read_event(line)
            if event.get("event") == "resized":
                newest = event
            if event.get("order") != name:
                continue
            if event["event"] == "resized":
                return event
            if event["event"] == "resize_refused":
                if newest is not None and newest["nodes"] == unasked:
                    return newest
                if event["why"] == has_already(event["nodes"]):
                    return {"of": event["nodes"], "nodes": event["nodes"]}
                raise ConflictError(f"{job} was not resized: {event['why']}")
        if why:
            raise ConflictError(why)
        if deadline is not None and time.monotonic() > deadline:
            hint = f"the resize may still happen: see `hp-ext status {job}`"
            raise WaitTimeoutError(f"{job} has not been resized within {timeout_s:g} s", hint=hint)
        time.sleep(_TICK_S)


def came_to(events: Iterable[Mapping[str, Any]], name: str) -> int | None:
    """Return the number of the node that got the ranks moved by request `name`; None if no event names a node. Pure."""
    came = None
    for event in events:
        match event:
            case {"event": "resize_begun", "order": order, "joining": [*joining]} if order == name:
                came = next((node for node in joining if isinstance(node, int)), None)
    return came


def wait_until_left(job: JobConfig, start: Path, leaving: Mapping[int, str], runs: Callable[[], bool]) -> None:
    """Wait until the agents of the nodes in `leaving` have saved their checkpoints and ended, or the job has ended.

    Args:
        start: run folder of the job's newest start.
        leaving: number of each departing node, and its name for messages.
        runs: returns whether the job still runs; called several times a second.

    Raises:
        HyperpodExtError: an agent has not ended in the time that it has for shutdown.
    """
    elastic, grace_s = job.elastic, job.checkpoint.grace_s
    timeout_s = ((elastic and elastic.graceful_shutdown_s) or grace_s) + grace_s + _LEAVE_S
    deadline = time.monotonic() + timeout_s
    while late := [number for number in leaving if not (start / LEFT.format(number)).exists()]:
        if not runs():
            return
        if time.monotonic() > deadline:
            message = f"{job.name} continues without node {late[0]}, but the process of {leaving[late[0]]} does not end"
            raise HyperpodExtError(message, hint=f"see {start}/logs/node{late[0]}.log")
        time.sleep(_TICK_S)
