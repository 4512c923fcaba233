"""Section of a job's spec for queue, priority, network topology, and the machines that the job may use."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.names import DnsLabel, InstanceType, LabelKey, LabelValue, ObjectName


class Toleration(Config):
    """A Kubernetes toleration, which allows the job's pods on nodes with a taint."""

    key: LabelKey | None = None
    """Key of the taint. Without a key, the toleration matches taints with any key, and `operator` must be `Exists`."""
    operator: Literal["Exists", "Equal"] = "Exists"
    """`Exists` matches any value of the taint, `Equal` only `value`."""
    value: LabelValue | None = None
    """Value of the taint, for `operator: Equal`."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint that is tolerated. None: all effects."""
    seconds: NonNegativeInt | None = None
    """Seconds that a running pod stays on a node after the node gets a `NoExecute` taint. None: for ever."""


class Topology(Config):
    """How close the job's nodes must be to each other in the network."""

    level: Annotated[
        str,
        Field(
            pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-A-Za-z0-9_.]+$",
            examples=["topology.k8s.aws/network-node-layer-3"],
        ),
    ]
    """Node label whose value must be the same on all nodes, such as `topology.k8s.aws/network-node-layer-3`. Of AWS's
    three network layers, nodes with the same value for layer 3 are the closest."""
    required: bool = False
    """Whether the job waits until nodes with the same value of the label `level` are free. False: the job may run on
    nodes that are further apart."""


class Scheduling(Config):
    """Queue and priority of the job, and the conditions that a node must meet to run the job."""

    queue: Annotated[str, Field(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.]{0,252}$", examples=["team-queue"])] | None = None
    """Queue of the job: a local queue of Kueue, or a partition of Slurm."""
    priority: Annotated[str, Field(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.]{0,252}$", examples=["high"])] | None = None
    """Priority in the queue: a priority class of Kueue, or a QOS of Slurm."""
    pod_priority_class: ObjectName | None = None
    """Name of the Kubernetes priority class of the pods."""
    topology: Topology | None = None
    """How close the nodes must be in the network. This setting needs a queue of Kueue with topology-aware
    scheduling."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that the job's pods tolerate."""
    node_selector: dict[LabelKey, LabelValue] = {}
    """Labels that a node must have."""
    healthy_only: bool = True
    """Whether to use only nodes that HyperPod's health monitoring marks as schedulable and that failed no deep health
    check."""
    spread: bool = True
    """Whether each pod is placed on a different machine."""


class NodeGroup(Config):
    """A group of the job's nodes with one instance type and priority."""

    name: Annotated[DnsLabel, Field(examples=["base"])]
    """Name of the group, unique in the job."""
    nodes: Annotated[NonNegativeInt, Field(examples=[2])]
    """Number of nodes in the group, without spares. The sum over all groups must be equal to the job's `nodes`."""
    max_nodes: PositiveInt | None = None
    """Maximum number of nodes in the group, in an elastic job. Default: `nodes`."""
    spares: NonNegativeInt = 0
    """Number of additional nodes of the group that stay idle until another node of the job fails."""
    instance_type: InstanceType | None = None
    """Instance type of the group. Default: the job's instance type."""
    pod_priority_class: ObjectName | None = None
    """Name of the Kubernetes priority class of the group's pods. Pods with lower priority are preempted first."""
    node_selector: dict[LabelKey, LabelValue] = {}
    """Labels that a node of this group must have, in addition to the labels in the job's `node_selector`."""
