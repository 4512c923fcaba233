"""hp-ext list"""

from __future__ import annotations

import click

from ..command import Command, output_option
from ..output import print_result, say


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext list
  hp-ext list --target hyperpod-eks -o json""",
)
@click.option("--target", default="local", show_default=True, help="Where to look.")
@output_option()
def command(target: str, output: str) -> None:
    """List the jobs of a target, from whichever machine they were submitted: on Kubernetes those in the namespace of
    the current context, on Slurm your own, on SageMaker those of the region. On local: those of this machine."""
    from hyperpod_ext.submit.contract.targets import get_target

    from .status import table

    found = get_target(target).list_jobs()
    if not found and output == "table":
        say(f"{target} has no jobs: `hp-ext create-job --target {target}` makes one")
        return
    print_result([status.to_json() for status in found], output, table(found))
