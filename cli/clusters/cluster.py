"""The commands `hp-ext cluster ...`, for a cluster with its network, storage and EKS. Each command has its own file."""

from __future__ import annotations

import click

from ..lazy_group import LazyGroup, Section

COMMANDS = {
    "create": "Create only the cluster from its file; network, roles and EKS must exist.",
    "update": "Show the changes that the file would make to the cluster, and apply them.",
    "synth": "Write the templates, and show their resources and cost.",
    "diff": "Show changes of deployed stacks, and which resources are replaced.",
    "deploy": "Create or update the cluster with its network, storage, roles and EKS.",
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
  hp-ext cluster create -f cluster.yaml --dry-run
  hp-ext cluster synth -f cluster.yaml
  hp-ext cluster deploy -f cluster.yaml
  hp-ext cluster deploy -f cluster.yaml --scale
  hp-ext cluster diff -f cluster.yaml --against cdk.out
  hp-ext cluster nodes research

\b
A cluster of `deploy` has no machines at first. A second `deploy`, with `--scale`, adds the machines of the file. A job
with `cluster: NAME` in its spec then uses the bucket, role, queue and subnets of the cluster.""",
)
def command() -> None:
    """Create HyperPod clusters, each from one file, and manage them.

    `deploy` also creates the network, buckets, EKS and roles, with AWS CDK. `create` and `update` send only the request
    of the cluster, and need no CDK.
    """
