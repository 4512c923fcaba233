"""The command `hp-ext cluster describe`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ..command import Command, output_option
from ..output import columns, print_result
from .options import region_option


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  hp-ext cluster describe research
  hp-ext cluster describe research --region us-west-2 -o json""",
)
@click.argument("name", metavar="NAME|ARN")
@region_option
@output_option()
def command(name: str, region: str | None, output: str) -> None:
    """Show one HyperPod cluster: its status, orchestrator and groups of nodes."""
    from hyperpod_ext.clusters.existing import describe, summary

    found = summary(describe(name, region))
    print_result(found, output, text(found))


def text(found: Mapping[str, Any]) -> str:
    """Return the description of a cluster as text."""
    head = [(key, str(found[key])) for key in ("name", "status", "failure", "orchestrator") if found[key]]
    head += [(key.replace("_", " "), str(found[key])) for key in ("node_recovery", "created_at", "arn") if found[key]]
    if found["eks_cluster_arn"]:
        head.append(("EKS cluster", found["eks_cluster_arn"]))
    rows = [("GROUP", "TYPE", "NODES", "STATUS")]
    for group in found["groups"]:
        count = f"{group['count']}/{group['target']}"
        mark = " (restricted)" if group["restricted"] else ""
        rows.append((f"{group['name']}{mark}", group["instance_type"] or "-", count, group["status"] or "-"))
    return f"{columns(head)}\n\n{columns(rows)}"
