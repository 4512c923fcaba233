"""Orders to resize a local job that runs: its nodes are started and ended by whoever started the job."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.resize import ResizeOrder
from hyperpod_ext.errors import ConfigError, ConflictError, NotFoundError
from hyperpod_ext.submit.contract import resize
from hyperpod_ext.submit.contract.handle import JobHandle
from hyperpod_ext.submit.contract.run_files import Tail
from hyperpod_ext.submit.local import store as local_store

_RUN = "main"


@dataclass(frozen=True, slots=True)
class PendingResize:
    """An order that was left for a job."""

    submission: local_store.Submission
    job: str
    name: str
    note: str = ""


def order(handle: JobHandle, nodes: int) -> PendingResize:
    """Order the job on `nodes` nodes.

    Raises:
        NotFoundError: there is no such job.
        ConflictError: it does not run.
        ConfigError: it cannot run on so many.
    """
    submission = _find(handle)
    if not submission.is_running() or submission.read_status()["state"] != "running":
        raise ConflictError(f"{handle.name} does not run", hint="`hp-ext create-job` starts it again")
    job = JobConfig.model_validate_json(submission.job_file.read_bytes())
    if problem := resize.refusal(job, nodes):
        raise ConfigError([problem])
    while not (submission.run_dir(_RUN) / "events.jsonl").exists() and submission.is_running():
        time.sleep(0.05)  # what was there before the job began is none of its orders
    name = resize.new_name()
    resize.leave_order(submission.run_dir(_RUN), name, ResizeOrder(nodes=nodes))
    return PendingResize(submission, handle.name, name)


def outcome(ordered: PendingResize, timeout_s: float | None) -> dict[str, Any]:
    """Wait until the job goes on as was ordered; what that took, as the coordinator tells it.

    Raises:
        ConflictError: it was refused, or the job ended first.
        WaitTimeoutError: it takes longer than `timeout_s`.
    """

    def ended() -> str:
        return "" if ordered.submission.is_running() else f"{ordered.job} ended before it was resized"

    events = Tail(ordered.submission.run_dir(_RUN) / "events.jsonl")
    return resize.outcome(ordered.job, events, ordered.name, ended, timeout_s)


def _find(handle: JobHandle) -> local_store.Submission:
    submission = local_store.latest(handle.name)
    if submission is None:
        raise NotFoundError(f"there is no local job named {handle.name}", hint="`hp-ext status` lists them")
    return submission
