"""Requests to resize a running local job or to move its ranks. The job's engine starts and stops the nodes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.resize import MoveOrder, Order, ResizeOrder
from hyperpod_ext.errors import ConfigError, ConflictError, Problem
from hyperpod_ext.jobs.contract import resize
from hyperpod_ext.jobs.contract.handle import JobHandle
from hyperpod_ext.jobs.contract.run_files import Tail, read_event
from hyperpod_ext.jobs.local import store as local_store

_RUN = "main"


@dataclass(frozen=True, slots=True)
class PendingResize:
    """A request to a running local job: to resize it, or to move ranks."""

    submission: local_store.Submission
    job: str
    name: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class PendingMove:
    """A request to a running local job to move the ranks of a node to a spare."""

    order: PendingResize
    job: JobConfig
    node: int

    @property
    def name(self) -> str:
        """Name of the request."""
        return self.order.name


def order(handle: JobHandle, nodes: int) -> PendingResize:
    """Request a resize to `nodes` nodes.

    Raises:
        NotFoundError: there is no such job.
        ConflictError: the job does not run.
        ConfigError: the spec does not allow this number of nodes.
    """
    submission, job = _running(handle)
    if problem := resize.refusal(job, nodes):
        raise ConfigError([problem])
    return _leave(submission, handle.name, ResizeOrder(nodes=nodes))


def outcome(ordered: PendingResize, timeout_s: float | None) -> dict[str, Any]:
    """Wait until the job has carried out the request; return the coordinator's event about it.

    Args:
        timeout_s: maximum seconds to wait; None waits without a limit.

    Raises:
        ConflictError: the request was refused, or the job ended first.
        WaitTimeoutError: the request takes longer than `timeout_s`.
    """

    def ended() -> str:
        return "" if ordered.submission.is_running() else f"{ordered.job} ended before it was resized"

    events = Tail(ordered.submission.run_dir(_RUN) / "events.jsonl")
    return resize.outcome(ordered.job, events, ordered.name, ended, timeout_s)


def move(handle: JobHandle, node: str) -> PendingMove:
    """Request a move of the ranks of `node`, a node number, to a spare.

    Raises:
        NotFoundError: there is no such job.
        ConflictError: the job does not run.
        ConfigError: the job has no such node, or no spares.
    """
    submission, job = _running(handle)
    if not node.isdecimal():
        hint = "nodes of local jobs have numbers, counted from 0"
        raise ConfigError([Problem(f"{handle.name} has no node {node}", source="--node", hint=hint)])
    if problem := resize.refusal_to_move(job, int(node)):
        raise ConfigError([problem])
    return PendingMove(_leave(submission, handle.name, MoveOrder(node=int(node))), job, int(node))


def moved(ordered: PendingMove, timeout_s: float | None, *, drain: bool) -> dict[str, Any]:
    """Wait until the ranks run on the spare and the node's processes have ended; return the coordinator's event.

    Args:
        timeout_s: maximum seconds to wait for the move; None waits without a limit.
        drain: has no effect, because a local node has no scheduler.

    Raises:
        ConflictError: the request was refused, or the job ended first.
        WaitTimeoutError: the request takes longer than `timeout_s`.
    """
    del drain
    order, submission = ordered.order, ordered.order.submission
    done, start = outcome(order, timeout_s), submission.run_dir(_RUN)
    resize.wait_until_left(ordered.job, start, {ordered.node: f"node {ordered.node}"}, submission.is_running)
    came = resize.came_to(map(read_event, Tail(start / "events.jsonl").lines()), order.name)
    return {"node": ordered.node, "to": came, **done}


def _running(handle: JobHandle) -> tuple[local_store.Submission, JobConfig]:
    submission = local_store.find_running(handle.name)
    if submission.read_status()["state"] != "running":
        raise ConflictError(f"{handle.name} is not running", hint="start the job again with `hp-ext create-job`")
    return submission, submission.read_job()


def _leave(submission: local_store.Submission, job: str, order: Order) -> PendingResize:
    while not (submission.run_dir(_RUN) / "events.jsonl").exists() and submission.is_running():
        time.sleep(0.05)  # wait, because the job ignores requests from before its start
    name = resize.new_name()
    resize.leave_order(submission.run_dir(_RUN), name, order)
    return PendingResize(submission, job, name)
