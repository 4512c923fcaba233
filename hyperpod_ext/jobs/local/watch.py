"""Reads the status, events and output of a local job while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from hyperpod_ext.jobs.contract.job_status import JobStatus, StatusUpdate
from hyperpod_ext.jobs.contract.run_files import LogReader, Tail, last_step, read_event
from hyperpod_ext.jobs.local.result import lost_result
from hyperpod_ext.jobs.local.store import Submission
from hyperpod_ext.scratch import end_abandoned

_TICK_S = 0.1
RUNS = ("main", "undisturbed")


def watch(submission: Submission, with_lines: bool) -> Iterator[StatusUpdate]:
    """Yield updates until the job and all its processes have ended.

    Args:
        with_lines: also yield the output of the workers.
    """
    events = {run: Tail(submission.run_dir(run) / "events.jsonl") for run in RUNS}
    logs = {run: LogReader(submission.run_dir(run)) for run in RUNS}
    while True:
        running = submission.is_running()  # query the state before reading lines, so that no line is missed
        status = read_job_status(submission, running)
        yield StatusUpdate(
            status=status,
            events=tuple(
                event | {"run": run} for run in RUNS for line in events[run].lines() if (event := read_event(line))
            ),
            lines=tuple(line for run in RUNS for line in logs[run].lines()) if with_lines else (),
        )
        if status.ended and not running:
            return
        time.sleep(_TICK_S)


def follow_logs(submission: Submission, rank: int | None, follow: bool) -> Iterator[str]:
    """Yield the log lines of the main run.

    Args:
        rank: yield only lines of this rank; None yields lines of all ranks and nodes.
        follow: wait for new lines until the job has ended.
    """
    reader = LogReader(submission.run_dir("main"), rank)
    while True:
        running = follow and submission.is_running()
        yield from reader.lines()
        if not running:
            return
        time.sleep(_TICK_S)


def read_job_status(submission: Submission, running: bool) -> JobStatus:
    """Return the job's status from its files.

    If the engine of an unfinished job no longer runs, the job is first recorded as failed.

    Args:
        running: whether the job's engine runs.
    """
    if not running and not submission.has_ended():
        _end_as_lost(submission)
    known = submission.read_status()
    run = "undisturbed" if known["state"] == "comparing" else "main"
    step = last_step(submission.run_dir(run) / "events.jsonl")
    return JobStatus(
        name=submission.name,
        handle=submission.handle,
        state=known["state"],
        step=step.get("step"),
        of=step.get("of"),
        submitted_at=known["submitted_at"],
        ended_at=known.get("ended_at"),
        error=known["error"],
        folder=str(submission.folder),
    )


def _end_as_lost(submission: Submission) -> None:
    """Clean up, and write the result of a job whose keeper and engine were both killed."""
    if scratch := submission.read_status().get("scratch"):
        end_abandoned(Path(scratch))
    message = "the job's engine was killed before the job ended"
    log, ends = str(submission.engine_log), submission.node_ends()
    submission.end(lost_result(submission.name, submission.handle, message, log, ends))
