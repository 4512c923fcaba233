"""Orders to resize a local job that runs: a file in its run folder, which its coordinator looks for."""

from __future__ import annotations

import json
import time
from typing import Any

from hyperpod_ext.config.job import JobConfig
from hyperpod_ext.config.resize import RESIZES, ResizeOrder, allowed_sizes
from hyperpod_ext.errors import ConfigError, ConflictError, NotFoundError, Problem, WaitTimeoutError
from hyperpod_ext.files import write_whole
from hyperpod_ext.launch.handle import JobHandle
from hyperpod_ext.launch.targets import local_store, local_watch

_RUN = "main"


def order(handle: JobHandle, nodes: int) -> str:
    """Order the job on `nodes` nodes; returns the name of the order.

    Raises:
        NotFoundError: there is no such job.
        ConflictError: it does not run.
        ConfigError: it cannot run on so many.
    """
    submission = _find(handle)
    if not submission.is_running() or submission.read_status()["state"] != "running":
        raise ConflictError(f"{handle.name} does not run", hint="`hp-ext create-job` starts it again")
    job = JobConfig.model_validate_json(submission.job_file.read_bytes())
    if problem := refusal(job, nodes):
        raise ConfigError([problem])
    while not (submission.run_dir(_RUN) / "events.jsonl").exists() and submission.is_running():
        time.sleep(0.05)  # what was there before the job began is none of its orders
    folder = submission.run_dir(_RUN) / RESIZES
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{time.time_ns():020d}"
    write_whole(folder / f"{name}.json", ResizeOrder(nodes=nodes).model_dump_json() + "\n")
    return name


def refusal(job: JobConfig, nodes: int) -> Problem | None:
    """Why a job cannot run on so many nodes. Pure."""
    if job.elastic is None:
        hint = "give it `elastic` with min_nodes and max_nodes, and start it again"
        return Problem(f"{job.name} runs on exactly {job.nodes} nodes", source="--nodes", hint=hint)
    sizes = allowed_sizes(job.elastic, job.nodes, job.workers_per_node, job.global_batch_size)
    if nodes in sizes:
        return None
    allowed = allowed_sizes(job.elastic, job.nodes, job.workers_per_node, None)
    if nodes in allowed:
        ranks = nodes * job.workers_per_node
        message = f"its global batch of {job.global_batch_size} does not divide among {ranks} ranks"
    elif nodes < job.elastic.min_nodes:
        message = f"{nodes} is below elastic.min_nodes ({job.elastic.min_nodes})"
    elif nodes > job.elastic.max_nodes:
        message = f"{nodes} is above elastic.max_nodes ({job.elastic.max_nodes})"
    else:
        message = f"{nodes} is none of its sizes"
    return Problem(message, source="--nodes", hint=f"{job.name} can run on {', '.join(map(str, sizes))}")


def outcome(handle: JobHandle, name: str, timeout_s: float | None) -> dict[str, Any]:
    """Wait until the job goes on as was ordered; what that took, as the coordinator tells it.

    Raises:
        ConflictError: it was refused, or the job ended first.
        WaitTimeoutError: it takes longer than `timeout_s`.
    """
    submission = _find(handle)
    events = local_watch.Tail(submission.run_dir(_RUN) / "events.jsonl")
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        running = submission.is_running()
        for line in events.lines():
            event: dict[str, Any] = json.loads(line)
            if event.get("order") != name:
                continue
            if event["event"] == "resize_refused":
                raise ConflictError(f"{handle.name} stays as it is: {event['why']}")
            if event["event"] == "resized":
                return event
        if not running:
            raise ConflictError(f"{handle.name} ended before it was resized")
        if deadline is not None and time.monotonic() > deadline:
            hint = f"it may come yet; `hp-ext status {handle.name}` and its events tell"
            raise WaitTimeoutError(f"{handle.name} has not been resized within {timeout_s:g} s", hint=hint)
        time.sleep(0.1)


def _find(handle: JobHandle) -> local_store.Submission:
    submission = local_store.latest(handle.name)
    if submission is None:
        raise NotFoundError(f"there is no local job named {handle.name}", hint="`hp-ext status` lists them")
    return submission
