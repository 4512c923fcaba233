"""Models of the outputs of commands for clusters and their nodes."""

from __future__ import annotations

from typing import Literal

from hyperpod_ext.catalog.prices import Price, Source
from hyperpod_ext.clusters.cdk.changes import Effect, FieldChange
from hyperpod_ext.clusters.changes import RequestChange
from hyperpod_ext.jobs.job_files.job_report import Output

from .base import Request


class CreateRequest(Output):
    """A CreateCluster request that was checked, but not sent."""

    request: Request


class CreatedCluster(Output):
    """A cluster that was created."""

    name: str
    region: str
    arn: str
    status: str | None = None
    """Last status of the cluster, if `--wait` is used."""


class UpdateOutput(Output):
    """Changes of a cluster, and the UpdateCluster request that makes them."""

    name: str
    changes: list[RequestChange]
    request: Request | None
    """The UpdateCluster request; null if nothing changes, or only tags change."""


class ResourceChanged(Output):
    """Change of one resource of a stack."""

    stack: str
    id: str
    """Logical id of the resource in the template."""
    kind: str
    """CloudFormation type of the resource."""
    effect: Effect
    fields: list[FieldChange]
    breaks: bool
    """Whether the change would replace or delete the resource, or machines of a cluster."""


class DiffOutput(Output):
    """Differences between a cluster's file and the deployed stacks."""

    name: str
    changes: list[ResourceChanged]
    replaces: list[str]
    """Fields whose change would replace or delete a resource, as STACK.RESOURCE.FIELD."""


class CostItem(Output):
    """A kind of resource with a price per hour."""

    what: str
    price: Price | None
    """Price of one resource per hour; null if unknown."""
    now: int
    """Number of resources in the templates that will be deployed."""
    scaled: int
    """Number of resources if the cluster is deployed with `--scale`, which starts all machines."""
    note: str
    usd_now: float | None
    usd_scaled: float | None


class Costs(Output):
    """Estimated costs of a cluster per hour."""

    currency: Literal["USD"]
    region: str
    usd_an_hour_now: float
    usd_an_hour_scaled: float
    unknown: list[str]
    """Resources whose price is unknown."""
    by_use: dict[str, str]
    """CloudFormation types for which AWS charges by use, each with the unit of use."""
    lines: list[CostItem]
    sources: dict[str, Source]


class SynthOutput(Output):
    """Output of `hp-ext cluster synth`: the templates that were written."""

    name: str
    out: str
    """Folder with the templates."""
    scale: bool
    stacks: dict[str, dict[str, int]]
    """Number of resources of each CloudFormation type, for each stack."""
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
    """CloudFormation outputs of a cluster's stacks."""

    name: str
    region: str
    read_at: float
    """Time at which the outputs were read from AWS, in seconds since 1970."""
    outputs: dict[str, str]


class ClusterSummary(Output):
    """One cluster in the list of clusters."""

    name: str
    status: str
    created_at: str | None
    arn: str


class Group(Output):
    """A group of nodes in a cluster."""

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
    """EC2 instance id of the node."""
    logical_id: str | None
    group: str
    instance_type: str | None
    status: str
    message: str | None
    launched_at: str | None
    host: str | None


class DeletedCluster(Output):
    """A cluster that is deleted, or with `--dry-run` would be deleted."""

    name: str
    request: Request
    nodes: list[Node]
    """Nodes that are deleted together with the cluster."""
    arn: str | None = None
    status: Literal["deleting", "deleted"] | None = None


class NodeOutcome(Output):
    """AWS's response for one node."""

    id: str
    accepted: bool
    code: str | None = None
    message: str | None = None


class RecoveryOutput(Output):
    """Output of `hp-ext node reboot` and `hp-ext node replace`."""

    cluster: str
    action: Literal["reboot", "replace"]
    nodes: list[Node]
    requests: list[Request]
    outcomes: list[NodeOutcome] = []
    """AWS's response for each node. Empty with `--dry-run`."""


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
    """On Kubernetes: pods that were evicted from the nodes."""
    jobs: list[str] = []
    """On Slurm: jobs that run on the nodes, and continue until they end."""
