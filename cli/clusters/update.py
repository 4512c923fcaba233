"""The command `hp-ext cluster update`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..command import Command, output_option
from ..output import count, print_result, say
from .cluster_spec import ignore_option, read_cluster, say_warnings, with_lines

if TYPE_CHECKING:
    from hyperpod_ext.clusters.changes import RequestChange


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext cluster update -f cluster.yaml --dry-run
  hp-ext cluster update -f cluster.yaml --yes --wait""",
)
@click.option("-f", "--file", "file", required=True, type=click.Path(), metavar="FILE", help="The cluster's spec.")
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Change a field of the spec. Repeatable.")
@click.option("--dry-run", is_flag=True, help="Show the changes without making them.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--delete-groups", is_flag=True, help="Delete groups that are not in the spec.")
@click.option("--wait", is_flag=True, help="Wait until the update is done or has failed.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Stop waiting after this time; the update continues.",
)
@ignore_option
@output_option()
def command(
    file: str,
    overrides: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    delete_groups: bool,
    wait: bool,
    timeout: float | None,
    ignored: tuple[str, ...],
    output: str,
) -> None:
    """Update a HyperPod cluster to match its spec. Shows the changes, and asks for confirmation.

    Changes that need a new cluster or a new group are refused, because UpdateCluster cannot make them.
    """
    from hyperpod_ext.clusters import service
    from hyperpod_ext.clusters.changes import update_cluster_request

    loaded = read_cluster(file, overrides)
    cluster = loaded.config
    with with_lines(loaded):
        service.checked_create_request(cluster, ignored)
    say_warnings(loaded, ignored)
    described, found = service.changes(cluster)
    if not delete_groups:
        _say_kept([change for change in found if change.effect == "delete group"])
        found = [change for change in found if change.effect != "delete group"]
    request = update_cluster_request(cluster, found)
    if request is not None:
        request = service.checked("UpdateCluster", request)
    result = {"name": cluster.name, "changes": [change.to_json() for change in found], "request": request}
    table = "\n".join(map(str, found)) or f"{cluster.name} already matches its spec"
    stuck = [change for change in found if change.effect.startswith("replace")]
    if not found or (dry_run and not stuck):
        print_result(result, output, table)
        return
    say(table)
    if stuck:
        _refuse(stuck)
    if not yes:
        click.confirm(f"Change {cluster.name}?", abort=True, err=True)
    service.update(cluster, request, str(described["ClusterArn"]), found)
    if wait:
        for status in service.wait(cluster, timeout):
            say(f"{cluster.name}: {status}")
    print_result(result, output, f"{cluster.name}: {count(len(found), 'change')} sent")


def _say_kept(gone: list[RequestChange]) -> None:
    for change in gone:
        name = change.path.partition(".")[2]
        say(f"warning: group {name} is not in the spec, and is kept; --delete-groups deletes it with its machines")


def _refuse(stuck: list[RequestChange]) -> None:
    from hyperpod_ext.errors import Problem, UnsupportedError

    how = {
        "replace cluster": "this needs a new cluster: delete this cluster and create it again, or create another one",
        "replace group": "this needs a new group: give the group another name, and delete the old group",
    }
    raise UnsupportedError(
        [Problem("UpdateCluster cannot change this", path=change.path, hint=how[change.effect]) for change in stuck]
    )
