"""Resources of a cluster that `cdk/` creates in AWS: network, buckets, EKS, file system, add-ons, roles of jobs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.job.sagemaker import KmsKey, NetworkId, RoleArn
from hyperpod_ext.config.names import DnsLabel, InstanceType

Cidr = Annotated[str, Field(pattern=r"^\d{1,3}(\.\d{1,3}){3}/\d{1,2}$", examples=["10.192.0.0/16"])]
Zone = Annotated[str, Field(pattern=r"^([a-z]{2,4}(-[a-z]+)+-\d[a-z]|[a-z]{2,4}\d-az\d)$", examples=["usw2-az1"])]
"""Availability zone, by its id (`usw2-az1`, the same zone in every account) or by its name (`us-west-2a`)."""
ZonedGroup = Annotated[
    str,
    Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}$", description="name of an instance group"),
]
BucketName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")]
LogDays = Literal[
    1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3288, 3653
]
"""Days for which CloudWatch can keep logs."""


class Network(Config):
    """The network: a new one, or an existing one (`vpc_id`)."""

    cidr: Cidr = "10.192.0.0/16"
    """Addresses of the new network, /16 to /20. Each zone's machines get a quarter of them."""
    zones: Annotated[tuple[Zone, ...], Field(max_length=3, examples=[["usw2-az1", "usw2-az2"]])] = ()
    """Zones of the new network, all by id or all by name; EKS needs two. Machines are in the first zone, so put the
    zone of your capacity first. Zones can be appended later without changing the others."""
    group_zones: dict[ZonedGroup, Zone] = {}
    """Zones of groups that are not in the first zone, by group."""
    nat: Literal["one", "per-zone", "none"] = "one"
    """Gateways to the internet: one that all zones share, one in each zone, or none."""
    private_endpoints: bool = True
    """Use AWS's services from inside the network, without the gateway. S3 is always reached this way."""
    connected_cidrs: tuple[Cidr, ...] = ()
    """Addresses of networks that are or will be connected to this network. The addresses must not overlap with this
    network."""
    vpc_id: Annotated[NetworkId, Field(examples=["vpc-0123456789abcdef0"])] | None = None
    """Existing network. `vpc` of the cluster then names subnets and security groups of the machines, and only a
    security group for the file system is added to it."""
    control_plane_subnets: Annotated[tuple[NetworkId, ...], Field(max_length=16)] = ()
    """Subnets of the existing network in two zones or more, for a new EKS cluster."""


class Bucket(Config):
    """A bucket: new with a name chosen by AWS, new with a name of yours, or existing."""

    name: BucketName | None = None
    """Name of the new bucket."""
    existing: BucketName | None = None
    """An existing bucket, which is used and not changed."""
    kms_key: KmsKey | None = None
    """Your key that encrypts the existing bucket: ARN, id or alias. The new roles may use the key if the key's policy
    allows roles of the account."""


class Buckets(Config):
    """Buckets for data and checkpoints. Buckets and their objects stay when the cluster is deleted."""

    checkpoints: Bucket = Bucket()
    """Checkpoints. Objects below `jobs/` are kept until the job removes them. Objects below `milestones/` are kept for
    ever, in cheaper storage; objects below `ephemeral/` for `ephemeral_days`."""
    data: Bucket = Bucket()
    """Training data, which jobs can read."""
    lifecycle: Bucket = Bucket()
    """Scripts for new machines; the bucket's name starts with `sagemaker-`. The bucket is only created if the cluster
    needs it. Every HyperPod role of the account can read the bucket, so it must not contain secrets."""
    logs: Bucket = Bucket()
    """Access logs of the other buckets."""
    ephemeral_days: PositiveInt = 14
    """Days until objects below `ephemeral/` are removed."""
    noncurrent_days: PositiveInt = 3
    """Days in which overwritten or deleted objects can be restored."""
    multipart_days: PositiveInt = 2
    """Days until an unfinished upload is removed."""
    log_days: PositiveInt = 90
    """Days for which access logs are kept."""


class Eks(Config):
    """The new EKS cluster. To use an existing one, set `eks_cluster_arn` of the cluster."""

    version: Annotated[str, Field(pattern=r"^1\.\d{2}$", examples=["1.34"])] = "1.34"
    """Version of Kubernetes."""
    public_access: tuple[Cidr, ...] = ()
    """Addresses that may reach the cluster's API over the internet. Default: none; the API is reachable only from
    inside the network."""
    service_cidr: Cidr = "172.20.0.0/16"
    """Addresses of Kubernetes' services."""
    admins: tuple[RoleArn, ...] = ()
    """Roles with administrator access."""
    log_days: LogDays = 90
    """Days to keep the control plane's logs."""
    dependencies: Literal["external", "present"] = "external"
    """Whether `hp-ext cluster deploy` installs HyperPod's Helm chart after EKS is made (`external`), or it is installed
    already (`present`). The cluster needs it."""


class FileSystem(Config):
    """A file system of FSx for Lustre, in the zone of the machines. Nodes of Slurm mount it."""

    size_gib: Annotated[int, Field(ge=1200)] = 1200
    """Size in GiB: 1200, or a multiple of 2400."""
    throughput: Literal[125, 250, 500, 1000] = 125
    """Throughput in MB/s for each TiB."""
    path: Annotated[str, Field(pattern=r"^/[a-zA-Z0-9._/-]+$", max_length=1024)] = "/fsx"
    """Mount path on the nodes."""
    link_data: bool = False
    """Show the data bucket as the folder `data`, with files loaded on first read."""
    keep: bool = True
    """Keep the file system, and its cost, when the other resources are deleted. The network of the file system is then
    kept, too."""


class Team(Config):
    """Share of a team in the cluster. The team's pods are in namespace `hyperpod-ns-NAME`."""

    name: Annotated[DnsLabel, Field(max_length=40, examples=["research"])]
    """Name of the team, at most 40 characters."""
    instance_type: Annotated[InstanceType, Field(examples=["ml.p5.48xlarge"])]
    """Instance type of the quota."""
    count: Annotated[NonNegativeInt, Field(examples=[4])]
    """Number of machines in the quota."""
    weight: Annotated[NonNegativeInt, Field(le=100)] = 0
    """Weight of the team's fair share of idle machines."""
    sharing: Literal["LendAndBorrow", "Lend", "DontLend"] = "LendAndBorrow"
    """Whether the team lends its idle machines to other teams, and borrows theirs."""


class PriorityClass(Config):
    """A level of priority that jobs can name."""

    name: Annotated[DnsLabel, Field(examples=["training"])]
    """Name of the priority."""
    weight: Annotated[NonNegativeInt, Field(le=100, examples=[80])]
    """Jobs with a higher value go first."""


class TaskGovernance(Config):
    """Quotas and priorities of teams, by AWS's add-on for Kueue."""

    teams: tuple[Team, ...] = ()
    """Teams with a quota each."""
    priorities: Annotated[tuple[PriorityClass, ...], Field(max_length=10)] = ()
    """Levels of priority. Default: none, jobs run in the order of submission."""
    fair_share: bool = True
    """With `priorities`: share idle machines by the weights of teams, not in the order of submission."""


class Observability(Config):
    """Metrics of nodes and jobs in Amazon Managed Prometheus, by AWS's add-on."""

    level: Literal["BASIC", "ADVANCED"] = "BASIC"
    """Amount of metrics. ADVANCED costs several times as much."""
    workspace_arn: (
        Annotated[str, Field(pattern=r"^arn:aws[a-z-]*:aps:[a-z0-9-]+:\d{12}:workspace/[a-zA-Z0-9-]+$")] | None
    ) = None
    """Existing workspace. Default: a new one."""


class AddOns(Config):
    """Add-ons of EKS. Karpenter is `auto_scaling` of the cluster, AWS's memory tier is `tiered_storage`."""

    cert_manager: bool = False
    """Certificates inside Kubernetes; the training operator needs it."""
    training_operator: bool = False
    """HyperPod's training operator, which target hyperpod-eks submits to."""
    task_governance: TaskGovernance | None = None
    """Quotas and priorities of teams."""
    observability: Observability | None = None
    """Metrics of nodes and jobs."""


class JobRole(Config):
    """A role for pods of one service account, which may read data and write only checkpoints of their jobs."""

    namespace: Annotated[DnsLabel, Field(examples=["hyperpod-ns-research"])]
    """Namespace of the service account."""
    service_account: Annotated[DnsLabel, Field(examples=["training"])]
    """Name of the service account, which jobs set as `kubernetes.service_account`."""
    jobs: Annotated[str, Field(pattern=r"^[a-z0-9][-a-z0-9]{0,61}\*?$", examples=["tiny-gpt"])]
    """Name of the job whose checkpoints it can write, or a prefix of names with `*`: `research-*`."""


class Infrastructure(Config):
    """Resources around the cluster."""

    account: Annotated[str, Field(pattern=r"^\d{12}$", examples=["123456789012"])] | None = None
    """AWS account of all resources. Default: the account of the credentials."""
    network: Annotated[Network, Field(examples=[{"zones": ["usw2-az1", "usw2-az2"]}])]
    """The network."""
    buckets: Buckets = Buckets()
    """Buckets for data and checkpoints."""
    eks: Eks = Eks()
    """The EKS cluster; not used with Slurm."""
    file_system: FileSystem | None = None
    """A shared file system."""
    add_ons: AddOns = AddOns()
    """Add-ons of EKS."""
    job_roles: tuple[JobRole, ...] = ()
    """Roles of pods, on EKS. Jobs with `cluster` set to this cluster get the first role."""
    lifecycle_scripts: bool = True
    """With Slurm: new machines run this project's script after HyperPod's own set-up, unless their group has another
    script.
    """
