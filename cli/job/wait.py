"""The command `hp-ext wait`."""

from __future__ import annotations

import click

from ..command import JOB, Command, output_option, target_option


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext wait tiny-gpt
  hp-ext wait gpt-7b --target hyperpod-eks --timeout 3600 -o json""",
)
@click.argument("job", type=JOB, metavar="NAME|URL")
@target_option
@click.option("--follow", "-f", is_flag=True, help="Also show the output of the workers.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Stop waiting after this time; the job continues.",
)
@output_option("name")
def command(job: str, target: str, follow: bool, timeout: float | None, output: str) -> None:
    """Wait until a job has ended, and show its result. The exit code is 7 if the job has failed, and 8 after the
    timeout."""
    from hyperpod_ext.jobs.contract.handle import JobHandle

    from .create_job import wait_for_end

    wait_for_end(JobHandle.parse(job, target), output, timeout, follow)
