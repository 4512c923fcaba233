"""The command `hp-ext list`."""

from __future__ import annotations

import click

from ..command import TARGET, Command, output_option
from ..output import print_result, say


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext list
  hp-ext list --target hyperpod-eks -o json
  hp-ext list --kept s3://bucket/prefix""",
)
@click.option("--target", type=TARGET, default="local", show_default=True, help="Target whose jobs are listed.")
@click.option(
    "--kept",
    metavar="PLACE",
    help="List jobs whose events are stored under PLACE instead, even after their pods are gone.",
)
@output_option()
def command(target: str, kept: str | None, output: str) -> None:
    """List the jobs of a target. Lists all jobs in the namespace of the current context on Kubernetes, your own jobs on
    Slurm, all jobs in the region on SageMaker, and all jobs of this machine on target local."""
    from hyperpod_ext.jobs.contract.targets import get_target

    from .status import table

    if kept is not None:
        from ..report.runs import list_kept

        found = list_kept(kept)
    else:
        found = get_target(target).list_jobs()
    if not found and output == "table":
        say(f"{target} has no jobs: `hp-ext create-job --target {target}` makes one")
        return
    print_result([status.to_json() for status in found], output, table(found))
