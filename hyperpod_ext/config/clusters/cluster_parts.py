"""Sections of a cluster's spec: storage, software updates, restricted groups, Kubernetes and Slurm settings."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from hyperpod_ext.config.base import Config, ContradictionError
from hyperpod_ext.config.job.sagemaker import KmsKey, RoleArn, S3Uri, Vpc
from hyperpod_ext.config.names import InstanceType, LabelKey, LabelValue

FsxName = Annotated[str, Field(pattern=r"^(fs|fc)i?-[0-9a-f]{8,}\..{4,253}$")]
MountPath = Annotated[str, Field(pattern=r"^/[a-zA-Z0-9._/-]+$", max_length=1024)]
HealthCheck = Literal["InstanceStress", "InstanceConnectivity", "MultiNodeTrainingValidation"]
TrainingPlan = Annotated[
    str, Field(pattern=r"^arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:\d{12}:training-plan/.+$", max_length=2048)
]
GroupName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}$")]
ThreadsPerCore = Annotated[int, Field(ge=1, le=2)]
NodeCount = Annotated[int, Field(ge=0, le=6758)]


class Lifecycle(Config):
    """Scripts that every new node runs before it accepts jobs. Without lifecycle scripts, only HyperPod's own set-up
    runs."""

    source: Annotated[S3Uri, Field(examples=["s3://sagemaker-bucket/lifecycle"])]
    """S3 prefix that holds the scripts."""
    on_create: Annotated[str, Field(min_length=1, max_length=128)] | None = "on_create.sh"
    """Path of the script that prepares the node, relative to `source`."""
    on_init_complete: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Path of the script that runs after HyperPod's own set-up of the node, relative to `source`."""


class EbsVolume(Config):
    """A disk for each node."""

    kind: Literal["ebs"] = "ebs"
    size_gib: Annotated[int, Field(ge=1, le=16384)] | None = None
    """Size in GiB."""
    kms_key: KmsKey | None = None
    """Key that encrypts the disk."""
    root: bool = False
    """Whether this is the boot disk instead of an additional disk."""


class FsxLustre(Config):
    """A file system of FSx for Lustre, mounted on each node."""

    kind: Literal["fsx-lustre"] = "fsx-lustre"
    dns_name: Annotated[FsxName, Field(examples=["fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com"])]
    """DNS name of the file system."""
    mount_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,8}$", examples=["fsx"])]
    """Mount name of the file system in FSx."""
    path: MountPath | None = None
    """Mount path on the nodes. Default: HyperPod's default path, `/fsx`."""


class FsxOpenZfs(Config):
    """A file system of FSx for OpenZFS, mounted on each node."""

    kind: Literal["fsx-openzfs"] = "fsx-openzfs"
    dns_name: Annotated[FsxName, Field(examples=["fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com"])]
    """DNS name of the file system."""
    path: MountPath | None = None
    """Mount path on the nodes. Default: HyperPod's default path."""


Storage = Annotated[EbsVolume | FsxLustre | FsxOpenZfs, Field(discriminator="kind")]


class BatchSize(Config):
    """Nodes that are updated or rolled back at the same time: a number or a percentage of nodes."""

    nodes: PositiveInt | None = None
    """Number of nodes."""
    percent: Annotated[int, Field(ge=1, le=100)] | None = None
    """Percentage of the nodes."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.nodes is None) == (self.percent is None):
            raise ContradictionError(
                "exactly one of nodes and percent is required", None if self.percent is None else "percent"
            )
        return self


class Rollout(Config):
    """Batches of nodes in which a software update is applied."""

    batch: BatchSize | None = None
    """Nodes that are updated at the same time. Default: all nodes."""
    rollback_batch: BatchSize | None = None
    """Nodes that are rolled back at the same time."""
    wait_s: Annotated[NonNegativeInt, Field(le=3600)] | None = None
    """Seconds to wait after the update of one batch of nodes before the next batch of nodes is updated."""
    alarms: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=255)], ...], Field(max_length=10)] = ()
    """Names of CloudWatch alarms that roll the update back."""


class ScheduledUpdate(Config):
    """Schedule of HyperPod's automatic software updates."""

    schedule: Annotated[str, Field(pattern=r"^cron\(.+\)$", max_length=256, examples=["cron(0 3 ? * SUN *)"])]
    """Cron expression in AWS's format, in UTC."""
    rollout: Rollout | None = None
    """Batches of nodes in which the update is applied."""


class AutoPatch(Config):
    """Automatic security patches of the nodes."""

    strategy: Annotated[Literal["WhenIdle", "WhenAllIdle", "DrainFirst"], Field(examples=["WhenIdle"])]
    """`WhenIdle`: patch each node when the node is idle. `WhenAllIdle`: patch all nodes when all of them are idle.
    `DrainFirst`: patch each node after draining it."""
    next_date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}(T\d{2}:\d{2}:\d{2}Z)?$")] | None = None
    """Date of the next patch, such as `2027-01-31`."""
    rollout: Rollout | None = None
    """Batches of nodes in which the patch is applied."""
    idle_s: Annotated[int, Field(ge=3600, le=2160000)] | None = None
    """Maximum seconds to wait for idle nodes."""
    drain_timeout_s: Annotated[NonNegativeInt, Field(le=5400)] | None = None
    """Maximum seconds to drain a node."""
    on_drain_timeout: Literal["Force", "Skip"] | None = None
    """Action for a node that is not drained in time."""


class Taint(Config):
    """A Kubernetes taint of nodes: pods without a matching toleration are not scheduled on the nodes."""

    key: Annotated[LabelKey, Field(examples=["nvidia.com/gpu"])]
    """Key of the taint."""
    value: Annotated[LabelValue, Field(min_length=1)] | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = "NoSchedule"
    """Effect of the taint on pods."""


class GroupSlurm(Config):
    """Role of a group's nodes in Slurm."""

    node_type: Annotated[Literal["Controller", "Login", "Compute"], Field(examples=["Compute"])]
    """Type of the nodes in Slurm."""
    partition: Annotated[str, Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9])*$", max_length=1024)] | None = None
    """Name of the Slurm partition, for compute nodes."""


class LustreSize(Config):
    """Size of an FSx for Lustre file system that HyperPod creates for restricted groups."""

    size_gib: Annotated[int, Field(ge=1200, le=100800)] = 1200
    """Size in GiB."""
    throughput: Annotated[int, Field(ge=125, le=1000)] = 125
    """Throughput in MB/s per TiB of storage."""


class RestrictedGroup(Config):
    """Machines without access to the internet or to the account, for work on restricted models."""

    name: Annotated[GroupName, Field(examples=["restricted"])]
    """Name of the group, unique in the cluster."""
    instance_type: Annotated[InstanceType, Field(examples=["ml.p5.48xlarge"])]
    """SageMaker instance type."""
    count: Annotated[NodeCount, Field(examples=[2])]
    """Number of machines in the group."""
    execution_role: RoleArn | None = None
    """IAM role of the machines. Default: the cluster's `execution_role`."""
    threads_per_core: ThreadsPerCore | None = None
    """Threads per CPU core. 1 disables hyper-threading."""
    storage: Annotated[tuple[Storage, ...], Field(max_length=4)] = ()
    """Disks of each machine, and file systems that each machine mounts."""
    deep_health_checks: tuple[HealthCheck, ...] = ()
    """HyperPod's deep health checks that a new node must pass before it accepts jobs."""
    training_plan: TrainingPlan | None = None
    """Training plan that the machines come from."""
    vpc: Vpc | None = None
    """VPC subnets and security groups of the group. Default: the cluster's `vpc`."""
    scheduled_update: ScheduledUpdate | None = None
    """Schedule of software updates."""
    lustre: LustreSize | None = None
    """File system that only this group uses."""


class RestrictedEnvironment(Config):
    """Settings that all restricted groups share."""

    lustre: LustreSize = LustreSize()
    """File system of the restricted groups."""
    deletion: Literal["DeleteIfNotUsed", "Keep"] = "Keep"
    """Whether HyperPod deletes the file system together with the last restricted group, or keeps it."""


class AccountingDatabase(Config):
    """The database of Slurm's accounting."""

    endpoint: Annotated[
        str, Field(pattern=r"^[a-zA-Z0-9]([a-zA-Z0-9.-]{0,253}[a-zA-Z0-9])?$", examples=["db.example.com"])
    ]
    """Host name of the database."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of the database. Default: the default port of MySQL."""
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9$_]{1,64}$")] | None = None
    """Name of the database."""
    secret_arn: Annotated[
        str,
        Field(
            pattern=r"^arn:aws[a-z-]*:secretsmanager:[a-z0-9-]*:\d{12}:secret:.+$",
            examples=["arn:aws:secretsmanager:us-west-2:123456789012:secret:slurm"],
        ),
    ]
    """ARN of the Secrets Manager secret with the user and password of the database."""


class ClusterSlurm(Config):
    """Management of Slurm's configuration by HyperPod."""

    strategy: Literal["Overwrite", "Managed", "Merge"] | None = None
    """How HyperPod treats manual changes of Slurm's configuration: it overwrites, refuses or merges them."""
    accounting: AccountingDatabase | None = None
    """Database for Slurm's accounting."""


class TieredStorage(Config):
    """AWS's managed checkpoint tier in the nodes' memory, run by a daemon of AWS."""

    enabled: bool = True
    """Whether the daemon runs."""
    memory_percent: Annotated[int, Field(ge=0, le=100)] | None = None
    """Percentage of each node's memory that is reserved for AWS's managed tier."""


class AutoScaling(Config):
    """Settings of Karpenter, which adds and removes machines as pods need them."""

    enabled: bool = True
    """Whether Karpenter runs."""
    scaler: Literal["Karpenter"] = "Karpenter"
    """Name of the autoscaler."""
