"""Outputs of commands on clusters and their nodes."""

from __future__ import annotations

from typing import Literal

from hyperpod_ext.catalog.prices import Price, Source
from hyperpod_ext.clusters.cdk.changes import Effect, FieldChange
from hyperpod_ext.clusters.changes import RequestChange
from hyperpod_ext.jobs.job_files.job_report import Output

from .base import Request


class CreateRequest(Output):
    """A CreateCluster request that was not sent."""

    request: Request


class CreatedCluster(Output):
    """A cluster that was created."""

    name: str
    region: str
    arn: str
    status: str | None = None
    """The cluster's last status, with `--wait`."""


class UpdateOutput(Output):
    """An UpdateCluster request."""

    name: str
    changes: list[RequestChange]
    request: Request | None
    """null if nothing changes, or only tags."""


class ResourceChanged(Output):
    """One resource that differs."""

    stack: str
    id: str
    """Logical id in the template."""
    kind: str
    """CloudFormation type."""
    effect: Effect
    fields: list[FieldChange]
    breaks: bool
    """Whether the change would replace or delete the resource, or machines of a cluster."""


class DiffOutput(Output):
    """Differences between a file and the deployed stacks."""

    name: str
    changes: list[ResourceChanged]
    replaces: list[str]
    """Fields whose change replaces or deletes a resource, as STACK.RESOURCE.FIELD."""


class CostItem(Output):
    """A resource with a price per hour."""

    what: str
    price: Price | None
    """Price of one item per hour; null if unknown."""
    now: int
    """Number of existing items."""
    scaled: int
    """Number of items with `--scale`."""
    note: str
    usd_now: float | None
    usd_scaled: float | None


class Costs(Output):
    """Costs per hour."""

    currency: Literal["USD"]
    region: str
    usd_an_hour_now: float
    usd_an_hour_scaled: float
    unknown: list[str]
    """Resources whose price is unknown."""
    by_use: dict[str, str]
    """CloudFormation types that are paid by use."""
    lines: list[CostItem]
    sources: dict[str, Source]


class SynthOutput(Output):
    """Templates that were written."""

    name: str
    out: str
    """Folder of the templates."""
    scale: bool
    stacks: dict[str, dict[str, int]]
    """Number of resources of each type, by stack."""
    costs: Costs


class DeployOutput(Output):
    """A deployed cluster."""

    name: str
    account: str
    region: str
    scale: bool
    changes: list[ResourceChanged]
    costs: Costs
    outputs: dict[str, str]


class OutputsOutput(Output):
    """Outputs of a cluster's stacks."""

    name: str
    region: str
    read_at: float
    """Seconds since 1970."""
    outputs: dict[str, str]


class ClusterSummary(Output):
    """One cluster of a list."""

    name: str
    status: str
    created_at: str | None
    arn: str


class Group(Output):
    """A group of nodes."""

    name: str
    instance_type: str | None
    count: int | None
    target: int | None
    status: str | None
    restricted: bool


class ClusterOutput(ClusterSummary):
    """One cluster."""

    failure: str | None
    orchestrator: Literal["eks", "slurm"]
    eks_cluster_arn: str | None
    node_recovery: str | None
    groups: list[Group]


class Node(Output):
    """A node of a cluster."""

    id: str
    """Instance id."""
    logical_id: str | None
    group: str
    instance_type: str | None
    status: str
    message: str | None
    launched_at: str | None
    host: str | None


class DeletedCluster(Output):
    """A cluster that is deleted, or with `--dry-run` would be."""

    name: str
    request: Request
    nodes: list[Node]
    """Nodes that are deleted with the cluster."""
    arn: str | None = None
    status: Literal["deleting", "deleted"] | None = None


class NodeOutcome(Output):
    """AWS's response for one node."""

    id: str
    accepted: bool
    code: str | None = None
    message: str | None = None


class RecoveryOutput(Output):
    """Nodes that are rebooted or replaced."""

    cluster: str
    action: Literal["reboot", "replace"]
    nodes: list[Node]
    requests: list[Request]
    outcomes: list[NodeOutcome] = []
    """Missing with `--dry-run`."""


class EvictedPod(Output):
    """A pod on a drained node."""

    namespace: str
    name: str
    node: str


class DrainOutput(Output):
    """Drained nodes."""

    nodes: list[str]
    state: Literal["unchanged", "schedulable", "unschedulable"]
    pods: list[EvictedPod] = []
    """Pods that were evicted, on Kubernetes."""
    jobs: list[str] = []
    """Running jobs on the nodes, on Slurm."""
