"""When and where a job's nodes are placed: queue, priority, topology, and which machines may be used."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.names import DnsLabel, InstanceType, LabelKey, LabelValue, ObjectName


class Toleration(Config):
    """Lets the job run on nodes that a taint keeps others from."""

    key: LabelKey | None = None
    """Key of the taint. None: every taint, and `operator` must be `Exists`."""
    operator: Literal["Exists", "Equal"] = "Exists"
    """`Exists`: whatever its value; `Equal`: only with `value`."""
    value: LabelValue | None = None
    """Value of the taint, for `Equal`."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Only this effect of the taint. None: all."""
    seconds: NonNegativeInt | None = None
    """How long a running pod stays after a `NoExecute` taint came. None: for ever."""


class Topology(Config):
    """How close together the nodes must be."""

    level: Annotated[
        str,
        Field(
            pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-A-Za-z0-9_.]+$",
            examples=["topology.k8s.aws/network-node-layer-3"],
        ),
    ]
    """Label whose value the nodes share, `topology.k8s.aws/network-node-layer-3`; of the three layers, 3 is the
    closest."""
    required: bool = False
    """Rather wait than run further apart."""


class Scheduling(Config):
    """When and where the job's nodes are placed."""

    queue: Annotated[str, Field(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.]{0,252}$", examples=["team-queue"])] | None = None
    """Queue of the job: the local queue of Kueue, or the partition of Slurm."""
    priority: Annotated[str, Field(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.]{0,252}$", examples=["high"])] | None = None
    """Priority in the queue: a priority class of Kueue, or a QOS of Slurm."""
    pod_priority_class: ObjectName | None = None
    """Priority class of the pods, which the Kubernetes scheduler itself acts on."""
    topology: Topology | None = None
    """How close together the nodes must be; needs a queue of Kueue that knows of topology."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that the job's pods put up with."""
    node_selector: dict[LabelKey, LabelValue] = {}
    """Labels that a node must have."""
    healthy_only: bool = True
    """Only nodes that HyperPod's health monitoring calls schedulable, and that have no failed deep health
    check."""
    spread: bool = True
    """Each pod on a node of its own."""


class NodeGroup(Config):
    """Some of the job's nodes, alike among themselves: of one instance type, or of one priority."""

    name: Annotated[DnsLabel, Field(examples=["base"])]
    """Name of the group, unique in the job."""
    nodes: Annotated[NonNegativeInt, Field(examples=[2])]
    """Nodes of the group; those of all groups together are the job's `nodes`."""
    max_nodes: PositiveInt | None = None
    """Nodes that an elastic job may grow to in this group. Default: `nodes`."""
    spares: NonNegativeInt = 0
    """Further nodes of the group that wait without work until another fails."""
    instance_type: InstanceType | None = None
    """Instance type of the group, where it differs from the job's."""
    pod_priority_class: ObjectName | None = None
    """Priority class of the group's pods: groups of lower priority make room first when others need nodes."""
    node_selector: dict[LabelKey, LabelValue] = {}
    """Labels that a node of this group must have, besides the job's own."""
