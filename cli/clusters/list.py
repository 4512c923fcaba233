"""The command `hp-ext cluster list`."""

from __future__ import annotations

import click

from ..command import Command, output_option
from ..output import columns, print_result, say
from .options import region_option


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext cluster list
  hp-ext cluster list --region us-west-2 -o json""",
)
@region_option
@output_option()
def command(region: str | None, output: str) -> None:
    """List all HyperPod clusters of a region."""
    from hyperpod_ext.clusters.existing import list_clusters

    found = list_clusters(region)
    if not found and output == "table":
        say("no clusters in this region: `hp-ext cluster create` or `hp-ext cluster deploy` makes one")
        return
    rows = [("NAME", "STATUS", "CREATED"), *((c["name"], c["status"], c["created_at"] or "-") for c in found)]
    print_result(found, output, columns(rows))
