"""The command `hp-ext logs`."""

from __future__ import annotations

import click

from ..command import JOB, Command, target_option


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext logs tiny-gpt
  hp-ext logs tiny-gpt --rank 0 --follow""",
)
@click.argument("job", type=JOB, metavar="NAME|URL")
@click.option("--rank", type=click.IntRange(min=0), help="Show only the output of this rank.")
@target_option
@click.option("-f", "--follow", is_flag=True, help="Follow the output until the job has ended.")
def command(job: str, target: str, rank: int | None, follow: bool) -> None:
    """Show the output of a job's workers. Each line begins with the rank of the worker."""
    from hyperpod_ext.jobs.contract.handle import JobHandle
    from hyperpod_ext.jobs.contract.targets import get_target

    handle = JobHandle.parse(job, target)
    for line in get_target(handle.target).logs(handle, rank, follow):
        click.echo(line)
