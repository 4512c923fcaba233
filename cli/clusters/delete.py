"""The command `hp-ext cluster delete`."""

from __future__ import annotations

import click

from ..command import Command, output_option
from ..output import count, print_result, say
from .options import region_option


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext cluster delete research --dry-run
  hp-ext cluster delete research --yes --wait""",
)
@click.argument("name", metavar="NAME|ARN")
@region_option
@click.option("--dry-run", is_flag=True, help="Show the nodes that would be deleted, and delete nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--wait", is_flag=True, help="Wait until the cluster is deleted, or until its deletion has failed.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Stop waiting after this time; the deletion continues.",
)
@output_option()
def command(
    name: str, region: str | None, dry_run: bool, yes: bool, wait: bool, timeout: float | None, output: str
) -> None:
    """Delete a HyperPod cluster with all its nodes. Shows the nodes, and asks for confirmation.

    The buckets, network and EKS cluster are kept. To delete resources that `hp-ext cluster deploy` has created, delete
    their CloudFormation stacks.
    """
    from hyperpod_ext.clusters import existing

    from .nodes import text

    request, ending = existing.delete_request(name, region)
    result: dict[str, object] = {"name": name, "request": request, "nodes": ending}
    if dry_run:
        print_result(result, output, text(ending))
        say(f"{name} was not deleted; {count(len(ending), 'node')} would be deleted with it")
        return
    if not yes:
        say(text(ending))
        click.confirm(f"Delete {name} with its {count(len(ending), 'node')}?", abort=True, err=True)
    result["arn"] = existing.delete(request, region)
    if wait:
        hint = f"the deletion continues; `hp-ext cluster describe {name}` shows its status"
        for status in existing.wait(name, region, timeout, hint):
            say(f"{name}: {status}")
    result["status"] = "deleted" if wait else "deleting"
    print_result(result, output, f"{name}: {result['status']}")
