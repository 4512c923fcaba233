"""The command `hp-ext status`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..command import JOB, Command, output_option, target_option
from ..output import columns, print_result, say

if TYPE_CHECKING:
    from hyperpod_ext.jobs.contract.job_status import JobStatus


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext status
  hp-ext status tiny-gpt -o json
  hp-ext status gpt-7b --target hyperpod-eks""",
)
@click.argument("job", type=JOB, required=False, metavar="[NAME|URL]")
@target_option
@output_option()
def command(job: str | None, target: str, output: str) -> None:
    """Show the state of one job, or of all jobs of a target."""
    from hyperpod_ext.jobs.contract.handle import JobHandle
    from hyperpod_ext.jobs.contract.targets import get_target

    if job is None:
        found = get_target(target).list_jobs()
        if not found and output == "table":
            say("no jobs yet: `hp-ext create-job` makes one")
            return
        print_result([status.to_json() for status in found], output, table(found))
        return
    handle = JobHandle.parse(job, target)
    from ..report.runs import why_failed

    status = get_target(handle.target).status(handle)
    error = why_failed(handle, status.to_json())
    text = table([status])
    if error is not None:
        text += f"\n\n{error['message']}"
    if status.folder:
        text += f"\n\nfiles: {status.folder}"
    print_result(status.to_json() | {"error": error}, output, text)
    if status.step is None:
        _warn_of_unprotected(status.folder)


def _warn_of_unprotected(folder: str) -> None:
    """Print a warning if a job trains without run.steps(). Slow, because the whole event log is read."""
    from hyperpod_ext.runtime.events.report import unprotected

    from ..job_events import read_events_of

    for warning in unprotected(read_events_of(folder)):
        say(f"warning: {warning}")


def table(jobs: list[JobStatus]) -> str:
    """Return a table with one line for each job."""
    rows = [("NAME", "STATE", "STEP", "SUBMITTED", "URL")]
    for job in jobs:
        step = "-" if job.step is None else f"{job.step}/{job.of or '?'}"
        rows.append((job.name, job.state, step, job.submitted_at, job.handle))
    return columns(rows)
