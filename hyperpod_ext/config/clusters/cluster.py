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
    """SageMaker instance type, such as `ml.p5.48xlarge`."""
    other_types: Annotated[tuple[InstanceType, ...], Field(max_length=19)] = ()
    """Instance types to use if no machine of `instance_type` is available."""
    count: Annotated[NodeCount, Field(examples=[2])]
    """Number of machines in the group, spares included."""
    spares: NonNegativeInt = 0
    """Number of the group's machines that stay idle until another machine of the group fails."""
    min_count: NodeCount | None = None
    """Minimum number of machines with which the group becomes ready. HyperPod still looks for the group's remaining
    machines."""
    execution_role: RoleArn | None = None
    """IAM role of the machines. Default: the cluster's `execution_role`."""
    lifecycle: Lifecycle | None = None
    """Scripts that every new node runs. By default, a new node runs only HyperPod's own set-up."""
    threads_per_core: ThreadsPerCore | None = None
    """Threads per CPU core. 1 disables hyper-threading."""
    storage: Annotated[tuple[Storage, ...], Field(max_length=4)] = ()
    """Disks of each machine, and file systems that each machine mounts."""
    deep_health_checks: tuple[HealthCheck, ...] = ()
    """HyperPod's deep health checks that a new node must pass before it accepts jobs."""
    training_plan: TrainingPlan | None = None
    """Training plan that the machines come from."""
    capacity: Literal["spot", "on-demand"] | None = None
    """Kind of EC2 capacity. AWS can take spot machines away at any time."""
    vpc: Vpc | None = None
    """VPC subnets and security groups of the group. Default: the cluster's `vpc`."""
    network_interface: Literal["efa", "efa-only"] | None = None
    """Type of the EFA interfaces: `efa` carries IP traffic as well, `efa-only` does not."""
    image: Annotated[str, Field(pattern=r"^(ami-[0-9a-fA-F]{8,17}|default)$")] | None = None
    """AMI of the machines. Default: the newest AMI of HyperPod."""
    image_release: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$")] | None = None
    """Release of HyperPod's AMI."""
    scheduled_update: ScheduledUpdate | None = None
    """Schedule of software updates."""
    auto_patch: AutoPatch | None = None
    """Settings of automatic security patches."""
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
    """AWS region, such as `us-west-2`."""
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
    """ARN of the EKS cluster that the machines join. Required to create a cluster with `orchestrator: eks`."""
    slurm: ClusterSlurm | None = None
    """Settings of HyperPod's management of Slurm's configuration."""
    instance_groups: Annotated[
        tuple[InstanceGroup, ...],
        Field(
            max_length=100,
            examples=[[{"name": "workers", "instance_type": "ml.p5.48xlarge", "count": 2}]],
        ),
    ] = ()
    """Groups of machines. A cluster needs at least one group, in `instance_groups` or in `restricted_groups`."""
    restricted_groups: Annotated[tuple[RestrictedGroup, ...], Field(max_length=100)] = ()
    """Groups of machines without access to the internet or to the account, for work on restricted models."""
    restricted_environment: RestrictedEnvironment | None = None
    """Settings that all restricted groups share."""
    execution_role: RoleArn | None = None
    """IAM role of the machines in groups without an `execution_role`."""
    cluster_role: RoleArn | None = None
    """IAM role with which HyperPod itself adds and removes machines."""
    vpc: Vpc | None = None
    """VPC subnets and security groups of the machines."""
    node_recovery: Literal["Automatic", "None"] = "Automatic"
    """Whether HyperPod replaces faulty nodes automatically."""
    continuous_provisioning: bool = False
    """Whether groups start with the machines that are available, while HyperPod continues to look for the remaining
    machines."""
    tiered_storage: TieredStorage | None = None
    """Settings of AWS's managed checkpoint tier. This project's own memory tier does not use AWS's managed tier."""
    auto_scaling: AutoScaling | None = None
    """Settings of Karpenter, which adds and removes machines."""
    tags: Annotated[dict[TagKey, TagValue], Field(max_length=50)] = {}
    """Tags of the cluster."""
    checkpoint_bucket: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")] | None = None
    """Name of the S3 bucket for checkpoints of jobs."""
    account: AccountFacts | None = None
    """Existing subnets, training plans, file systems and quotas of the account, for checks of the cluster. No request
    to AWS contains the section `account`."""
    infrastructure: Infrastructure | None = None
    """AWS resources that `hp-ext cluster deploy` creates for the cluster. `hp-ext cluster deploy` also fills in unset
    fields of the cluster that name the created resources: network, roles, EKS cluster."""

    @property
    def working_nodes(self) -> int:
        """Number of machines that can run ranks at the same time: all machines except spares."""
        return sum(group.count - group.spares for group in self.instance_groups)
