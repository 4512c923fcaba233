"""The command `hp-ext cluster nodes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from ..command import Command, output_option
from ..output import columns, print_result
from .options import region_option


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext cluster nodes research
  hp-ext cluster nodes research --group workers -o json""",
)
@click.argument("name", metavar="NAME|ARN")
@click.option("--group", metavar="GROUP", help="List only the nodes of this group.")
@region_option
@output_option()
def command(name: str, group: str | None, region: str | None, output: str) -> None:
    """List the nodes of a HyperPod cluster, with their ids and error messages."""
    from hyperpod_ext.clusters.existing import describe, nodes, summary
    from hyperpod_ext.config.files.nearest import suggest
    from hyperpod_ext.errors import NotFoundError

    found = nodes(name, region, group)
    if group is not None and not found:
        groups = [str(one["name"]) for one in summary(describe(name, region))["groups"]]
        if group not in groups:
            raise NotFoundError(f"{name} has no group {group}", hint=suggest(group, groups))
    print_result(found, output, text(found))


def text(found: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with one line for each node."""
    rows = [("NODE", "GROUP", "TYPE", "STATUS", "HOST", "")]
    for node in found:
        wrong = node["message"] if node["status"] != "Running" else None
        rows.append(
            (node["id"], node["group"], node["instance_type"] or "-", node["status"], node["host"] or "-", wrong or "")
        )
    return columns(rows)
