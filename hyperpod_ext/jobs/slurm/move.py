"""Moves the ranks of a node of a running job on Slurm to a spare, and drains the node.

The request is a file in the run folder. If the job is not elastic, the node stays in the job's allocation, because a
restarted step needs all original nodes of the job.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.resize import MoveOrder
from hyperpod_ext.errors import ConfigError, HyperpodExtError, Problem, UnsupportedError
from hyperpod_ext.jobs.contract import resize
from hyperpod_ext.jobs.contract.handle import JobHandle
from hyperpod_ext.jobs.contract.run_files import Tail, read_event
from hyperpod_ext.jobs.slurm import client as slurm
from hyperpod_ext.jobs.slurm import target as hyperpod_slurm
from hyperpod_ext.jobs.slurm.resize import PendingResize, give_back, hosts_of, runs, seldom, spec_of, training_start


@dataclass(frozen=True, slots=True)
class PendingMove:
    """A request to a running job on Slurm to move the ranks of a node to a spare."""

    job: hyperpod_slurm.Submitted
    spec: JobConfig
    start: Path
    """Run folder of the job's current start, in which the request is written."""
    name: str
    node: int
    host: str
    """Slurm's name of the node; empty if a resize added the node with an allocation of its own, which ends when the
    node leaves the job."""
    events: Tail
    """Reader of the job's events that follow the request."""


def move(handle: JobHandle, node: str) -> PendingMove:
    """Request a move of a node's ranks to a spare.

    Args:
        node: number of the node in the job, or name of the node in Slurm.

    Raises:
        NotFoundError: there is no such job.
        ConflictError: the job is not training.
        ConfigError: the job has no such node, or no spares.
    """
    job = hyperpod_slurm.submission(handle)
    spec = spec_of(job)
    if spec.mode != "ours":
        hint = "ranks can move only in mode ours, in a job with spares"
        raise UnsupportedError([Problem(f"ranks cannot move in mode {spec.mode}", path="mode", hint=hint)])
    if problem := resize.refusal_to_move(spec, 0):
        raise ConfigError([problem])
    start = training_start(job, handle)
    hosts = hosts_of(start)
    number = _number_of(node, hosts)
    if number is None:
        known = ", ".join(f"{number} ({host})" for number, host in sorted(hosts.items()))
        hint = f"the job's nodes are {known}"
        raise ConfigError([Problem(f"{job.name} does not run on node {node}", source="--node", hint=hint)])
    if problem := resize.refusal_to_move(spec, number):
        raise ConfigError([problem])
    events = Tail(start / "events.jsonl")
    events.lines()
    name = resize.new_name()
    resize.leave_order(start, name, MoveOrder(node=number))
    return PendingMove(job, spec, start, name, number, hosts.get(number, ""), events)


def moved(ordered: PendingMove, timeout_s: float | None, *, drain: bool) -> dict[str, Any]:
    """Wait until the ranks run on the spare and the node's agent has ended.

    Args:
        timeout_s: maximum seconds to wait for the move; None waits without a limit.
        drain: drain the node in Slurm after the move.

    Returns:
        The coordinator's event about the move. If the node was drained, `drain` is its name; if it could not be
        drained, `why_no_drain` is the reason.

    Raises:
        ConflictError: the request was refused, or the job ended before the move.
        WaitTimeoutError: the request takes longer than `timeout_s`.
    """
    job, still_runs = ordered.job, seldom(lambda: runs(ordered.job))
    over, called = f"{job.name} ended or was requeued before the ranks moved", ordered.host or f"node {ordered.node}"
    done = resize.outcome(job.name, ordered.events, ordered.name, lambda: "" if still_runs() else over, timeout_s)
    resize.wait_until_left(ordered.spec, ordered.start, {ordered.node: called}, still_runs)
    came = resize.came_to(map(read_event, Tail(ordered.start / "events.jsonl").lines()), ordered.name)
    result = {"node": ordered.node, "to": came, **done, **(_drain(ordered) if drain else {})}
    if ordered.spec.elastic is None:
        return result
    size = done["nodes"]
    order = PendingResize(job, ordered.spec, ordered.start, ordered.name, size, size, ordered.events)
    return result | give_back(order, done)


def _number_of(node: str, hosts: dict[int, str]) -> int | None:
    """Return the number of a node, given its name in Slurm or its number as text; None if `node` is neither.

    Args:
        hosts: Slurm's name of each node of the job, by the node's number.
    """
    named = [number for number, host in hosts.items() if host == node]
    return named[0] if named else int(node) if node.isdecimal() else None


def _drain(ordered: PendingMove) -> dict[str, Any]:
    if not ordered.host:
        return {"why_no_drain": "the node has an allocation of its own, which ends when the node leaves the job"}
    try:
        slurm.take_no_jobs([ordered.host], f"hp-ext move {ordered.job.name}")
    except HyperpodExtError as error:  # do not raise: the ranks have moved, and only administrators may drain nodes
        return {"why_no_drain": str(error)}
    return {"drain": ordered.host}
