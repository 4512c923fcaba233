"""The commands `hp-ext cluster ...`, for a cluster with its network, storage and EKS. Each command has its own file."""

from __future__ import annotations

import click

from ..lazy_group import LazyGroup, Section

COMMANDS = {
    "synth": "Write the templates, and show their resources and cost.",
    "diff": "Show changes of deployed stacks, and which resources are replaced.",
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
A new cluster has no machines. A second `deploy`, with `--scale`, adds the machines of the file. A job
with `cluster: NAME` in its spec then uses the bucket, role, queue and subnets of the cluster.""",
)
def command() -> None:
    """Create a HyperPod cluster with its network, buckets, EKS and roles from one file. Uses AWS CDK."""
