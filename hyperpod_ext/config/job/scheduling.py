"""Placement of a job's nodes: queue, priority, topology, and allowed machines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.names import DnsLabel, InstanceType, LabelKey, LabelValue, ObjectName


class Toleration(Config):
    """Allows the job's pods on nodes with a taint."""

    key: LabelKey | None = None
    """Key of the taint. None: every taint, and `operator` must be `Exists`."""
    operator: Literal["Exists", "Equal"] = "Exists"
    """`Exists` matches any value of the taint, `Equal` only `value`."""
    value: LabelValue | None = None
    """Value of the taint, for `Equal`."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint that is tolerated. None: all effects."""
    seconds: NonNegativeInt | None = None
    """Seconds that a running pod stays after a `NoExecute` taint is added. None: for ever."""


class Topology(Config):
    """Required distance between the nodes."""

    level: Annotated[
        str,
        Field(
            pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-A-Za-z0-9_.]+$",
            examples=["topology.k8s.aws/network-node-layer-3"],
        ),
    ]
    """Label whose value the nodes must share, `topology.k8s.aws/network-node-layer-3`. Layer 3 is the closest of the
    three layers."""
    required: bool = False
    """Wait instead of running on nodes that are further apart."""


class Scheduling(Config):
    """Placement of the job's nodes."""

    queue: Annotated[str, Field(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.]{0,252}$", examples=["team-queue"])] | None = None
    """Queue of the job: the local queue of Kueue, or the partition of Slurm."""
    priority: Annotated[str, Field(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.]{0,252}$", examples=["high"])] | None = None
    """Priority in the queue: a priority class of Kueue, or a QOS of Slurm."""
    pod_priority_class: ObjectName | None = None
    """Priority class of the pods, for the Kubernetes scheduler."""
    topology: Topology | None = None
    """Required distance between the nodes; needs a queue of Kueue with topology."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that the job's pods tolerate."""
    node_selector: dict[LabelKey, LabelValue] = {}
    """Labels that a node must have."""
    healthy_only: bool = True
    """Only use nodes that HyperPod's health monitoring marks schedulable, and that have no failed deep health check."""
    spread: bool = True
    """Place each pod on its own node."""


class NodeGroup(Config):
    """A group of the job's nodes with one instance type and priority."""

    name: Annotated[DnsLabel, Field(examples=["base"])]
    """Name of the group, unique in the job."""
    nodes: Annotated[NonNegativeInt, Field(examples=[2])]
    """Nodes of the group. The sum over all groups must be the job's `nodes`."""
    max_nodes: PositiveInt | None = None
    """Maximum nodes of the group in an elastic job. Default: `nodes`."""
    spares: NonNegativeInt = 0
    """Additional nodes of the group that stay idle until another node fails."""
    instance_type: InstanceType | None = None
    """Instance type of the group. Default: the job's instance type."""
    pod_priority_class: ObjectName | None = None
    """Priority class of the group's pods: groups of lower priority are preempted first."""
    node_selector: dict[LabelKey, LabelValue] = {}
    """Labels that a node of this group must have, in addition to the job's."""
