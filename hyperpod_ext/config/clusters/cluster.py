"""ClusterConfig: the spec of a HyperPod cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.clusters.account import AccountFacts
from hyperpod_ext.config.clusters.cluster_parts import (
    AutoPatch,
    AutoScaling,
    ClusterSlurm,
    GroupName,
    GroupSlurm,
    HealthCheck,
    Lifecycle,
    NodeCount,
    RestrictedEnvironment,
    RestrictedGroup,
    ScheduledUpdate,
    Storage,
    Taint,
    ThreadsPerCore,
    TieredStorage,
    TrainingPlan,
)
from hyperpod_ext.config.clusters.infrastructure import Infrastructure
from hyperpod_ext.config.job.sagemaker import RoleArn, TagKey, TagValue, Vpc
from hyperpod_ext.config.names import InstanceType, LabelKey, LabelValue


class InstanceGroup(Config):
    """A group of machines with the same type and settings."""

    name: Annotated[GroupName, Field(examples=["workers"])]
    """Name of the group, unique in the cluster: letters, digits and inner dashes, at most 63 characters."""
    instance_type: Annotated[InstanceType, Field(examples=["ml.p5.48xlarge"])]
    """SageMaker instance type, `ml.p5.48xlarge`."""
    other_types: Annotated[tuple[InstanceType, ...], Field(max_length=19)] = ()
    """Types to use if no machine of `instance_type` is available."""
    count: Annotated[NodeCount, Field(examples=[2])]
    """Machines in the group."""
    spares: NonNegativeInt = 0
    """Machines of the group that stay idle until another machine fails."""
    min_count: NodeCount | None = None
    """Fewest machines with which the group is ready. HyperPod continues to look for the rest."""
    execution_role: RoleArn | None = None
    """Role of the machines. Default: the cluster's role."""
    lifecycle: Lifecycle | None = None
    """Scripts that every new node runs. Default: only HyperPod's own set-up."""
    threads_per_core: ThreadsPerCore | None = None
    """Threads per CPU core. 1 disables hyper-threading."""
    storage: Annotated[tuple[Storage, ...], Field(max_length=4)] = ()
    """Disks and file systems."""
    deep_health_checks: tuple[HealthCheck, ...] = ()
    """Tests that a new node passes before it takes work."""
    training_plan: TrainingPlan | None = None
    """Training plan that the machines come from."""
    capacity: Literal["spot", "on-demand"] | None = None
    """Kind of capacity; spot machines can be taken away."""
    vpc: Vpc | None = None
    """Network of the group. Default: the cluster's network."""
    network_interface: Literal["efa", "efa-only"] | None = None
    """Whether EFA interfaces carry IP traffic as well."""
    image: Annotated[str, Field(pattern=r"^(ami-[0-9a-fA-F]{8,17}|default)$")] | None = None
    """AMI of the machines. Default: HyperPod's newest."""
    image_release: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$")] | None = None
    """Release of HyperPod's AMI."""
    scheduled_update: ScheduledUpdate | None = None
    """Schedule of software updates."""
    auto_patch: AutoPatch | None = None
    """Automatic security patches."""
    labels: Annotated[dict[LabelKey, Annotated[LabelValue, Field(min_length=1)]], Field(max_length=50)] = {}
    """Labels of the nodes, on EKS."""
    taints: Annotated[tuple[Taint, ...], Field(max_length=50)] = ()
    """Taints of the nodes, on EKS."""
    slurm: GroupSlurm | None = None
    """Role of the machines in Slurm."""


class ClusterConfig(Config):
    """One HyperPod cluster."""

    name: Annotated[GroupName, Field(examples=["research"])]
    """Name of the cluster: letters, digits and inner dashes, at most 63 characters."""
    region: Annotated[str, Field(pattern=r"^[a-z]{2,4}(-[a-z]+)+-\d$", examples=["us-west-2"])]
    """AWS region, `us-west-2`."""
    orchestrator: Literal["eks", "slurm"] = "eks"
    """Scheduler of jobs on the cluster."""
    eks_cluster_arn: (
        Annotated[
            str,
            Field(
                pattern=r"^arn:aws[a-z-]*:eks:[a-z0-9-]*:\d{12}:cluster/[0-9A-Za-z][A-Za-z0-9_-]{0,99}$",
                examples=["arn:aws:eks:us-west-2:123456789012:cluster/research"],
            ),
        ]
        | None
    ) = None
    """EKS cluster that the machines join; required to create a cluster with orchestrator eks."""
    slurm: ClusterSlurm | None = None
    """How HyperPod maintains Slurm's configuration."""
    instance_groups: Annotated[
        tuple[InstanceGroup, ...],
        Field(
            max_length=100,
            examples=[[{"name": "workers", "instance_type": "ml.p5.48xlarge", "count": 2}]],
        ),
    ] = ()
    """Groups of machines. A cluster has at least one group, here or in `restricted_groups`."""
    restricted_groups: Annotated[tuple[RestrictedGroup, ...], Field(max_length=100)] = ()
    """Groups for work on restricted models."""
    restricted_environment: RestrictedEnvironment | None = None
    """Settings that all restricted groups share."""
    execution_role: RoleArn | None = None
    """Role of the machines of groups without their own."""
    cluster_role: RoleArn | None = None
    """Role with which HyperPod itself adds and removes machines."""
    vpc: Vpc | None = None
    """Network of the machines."""
    node_recovery: Literal["Automatic", "None"] = "Automatic"
    """Whether faulty nodes are replaced automatically."""
    continuous_provisioning: bool = False
    """Let groups start with available machines, and continue to look for the rest."""
    tiered_storage: TieredStorage | None = None
    """AWS's managed tier. This project's own memory tier does not use it."""
    auto_scaling: AutoScaling | None = None
    """Whether Karpenter adds and removes machines."""
    tags: Annotated[dict[TagKey, TagValue], Field(max_length=50)] = {}
    """Tags of the cluster."""
    checkpoint_bucket: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")] | None = None
    """S3 bucket for checkpoints of jobs."""
    account: AccountFacts | None = None
    """Existing subnets, training plans, file systems and quotas of the account, for checks of the cluster. These facts
    are never sent to AWS."""
    infrastructure: Infrastructure | None = None
    """Resources that `hp-ext cluster deploy` creates around the cluster. The command fills in unset fields of the
    cluster: network, roles, EKS cluster."""

    @property
    def working_nodes(self) -> int:
        """Number of machines that hold ranks at the same time: all machines except spares."""
        return sum(group.count - group.spares for group in self.instance_groups)
