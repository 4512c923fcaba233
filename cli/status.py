"""hp-ext status"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .command import Command, output_option
from .output import columns, print_result, say

if TYPE_CHECKING:
    from hyperpod_ext.launch.job_status import JobStatus


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext status
  hp-ext status tiny-gpt -o json""",
)
@click.argument("job", required=False, metavar="[NAME|URL]")
@output_option()
def command(job: str | None, output: str) -> None:
    """Show one job, or all of them."""
    from hyperpod_ext.launch.handle import JobHandle
    from hyperpod_ext.launch.targets import TARGETS, get_target

    if job is None:
        found = [status for name in TARGETS for status in get_target(name).list_jobs()]
        if not found and output == "table":
            say("no jobs yet: `hp-ext create-job` makes one")
            return
        print_result([status.to_json() for status in found], output, _table(found))
        return
    handle = JobHandle.parse(job)
    status = get_target(handle.target).status(handle)
    table = _table([status])
    if status.error is not None:
        table += f"\n\n{status.error['message']}"
    print_result(status.to_json(), output, f"{table}\n\nfiles: {status.folder}")


def _table(jobs: list[JobStatus]) -> str:
    rows = [("NAME", "STATE", "STEP", "SUBMITTED", "URL")]
    for job in jobs:
        step = "-" if job.step is None else f"{job.step}/{job.of or '?'}"
        rows.append((job.name, job.state, step, job.submitted_at, job.handle))
    return columns(rows)
