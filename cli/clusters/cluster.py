"""`hp-ext cluster`: a cluster with everything around it, one file a subcommand. CDK runs in a process of its own."""

from __future__ import annotations

import click

from ..lazy_group import LazyGroup, Section

COMMANDS = {
    "synth": "Write the templates, and tell what they make and cost.",
    "diff": "Show what would change, and what would be replaced.",
    "deploy": "Make the cluster, or bring it to its file.",
    "outputs": "Read what jobs need to know of a cluster.",
    "list": "List the clusters of a region.",
    "describe": "Show one cluster: its status and its groups.",
    "nodes": "List the nodes of a cluster.",
    "delete": "Delete a cluster with all its nodes.",
}


@click.group(
    cls=LazyGroup,
    sections=[Section("Commands", f"{__package__}", COMMANDS)],
    epilog="""\b
Examples:
  hp-ext cluster synth -f cluster.yaml
  hp-ext cluster deploy -f cluster.yaml
  hp-ext cluster deploy -f cluster.yaml --scale
  hp-ext cluster diff -f cluster.yaml --against cdk.out
  hp-ext cluster nodes research

\b
A new cluster has no machines: `--scale` brings the counts of its file, as a step of its own.
A job then names it, `cluster: NAME`, and has its bucket, role, queue and subnets.""",
)
def command() -> None:
    """Network, buckets, EKS, roles and the cluster itself, with CDK, from one file."""
