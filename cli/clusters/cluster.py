"""`hp-ext cluster`: a cluster with its network, storage and EKS, one file a subcommand."""

from __future__ import annotations

import click

from ..lazy_group import LazyGroup, Section

COMMANDS = {
    "synth": "Write the templates, and show their resources and cost.",
    "diff": "Show changes to deployed stacks, and what would be replaced.",
    "deploy": "Create or update the cluster from its file.",
    "outputs": "Read a cluster's outputs, and store them for jobs.",
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
A new cluster has no machines. `--scale` adds the machines of its file in a second step. A job with
`cluster: NAME` in its spec then uses the bucket, role, queue and subnets of this cluster.""",
)
def command() -> None:
    """Create network, buckets, EKS, roles and the cluster itself with CDK, from one file."""
