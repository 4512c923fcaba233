"""The command `hp-ext delete`."""

from __future__ import annotations

import click

from ..command import JOB, Command, output_option, target_option
from ..output import columns, count, print_result, say


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext delete gpt-7b --target hyperpod-eks --dry-run
  hp-ext delete gpt-7b --target hyperpod-eks --with-secret --yes""",
)
@click.argument("job", type=JOB, metavar="NAME|URL")
@target_option
@click.option(
    "--with-secret",
    is_flag=True,
    help="Also delete the job's secret. Without it, the signatures of the job's checkpoints cannot be verified.",
)
@click.option("--dry-run", is_flag=True, help="List the jobs that would be deleted, and stop.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@output_option()
def command(job: str, target: str, with_secret: bool, dry_run: bool, yes: bool, output: str) -> None:
    """Delete the Kubernetes objects of an ended job: the job, its pods and its network policy.

    Checkpoints are kept. The secret that signs checkpoints is also kept, so that the next job of the same name can read
    the checkpoints.
    """
    from hyperpod_ext.jobs.contract.handle import JobHandle
    from hyperpod_ext.jobs.contract.targets import LEFTOVERS

    from . import check_exists

    handle = JobHandle.parse(job, target)
    check_exists(handle)
    leftovers = LEFTOVERS.of(handle.target)
    found = leftovers.find(handle, with_secret)
    objects = [{"kind": kind, "name": name} for kind, name in found]
    table = columns([("KIND", "NAME"), *found])
    if not dry_run:
        if not yes:
            say(table)
            click.confirm(f"Delete {count(len(found), 'object')}?", abort=True, err=True)
        leftovers.delete(handle, found)
    print_result({"name": handle.name, "objects": objects, "deleted": not dry_run}, output, table)
    if dry_run:
        say("nothing was deleted")
