"""What is made around a cluster in AWS: network, buckets, EKS, file system, add-ons, roles of jobs. `cdk/` makes it."""

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
    """The network: a new one, or one that is there (`vpc_id`)."""

    cidr: Cidr = "10.192.0.0/16"
    """Addresses of the new network, /16 to /20. Each zone's machines get a quarter of them."""
    zones: Annotated[tuple[Zone, ...], Field(max_length=3, examples=[["usw2-az1", "usw2-az2"]])] = ()
    """Zones of the new network, all by id or all by name; EKS needs two. Machines are in the first: take the one that
    has your capacity. A zone that is added at the end changes nothing for the others."""
    group_zones: dict[ZonedGroup, Zone] = {}
    """Groups whose machines are in another of these zones."""
    nat: Literal["one", "per-zone", "none"] = "one"
    """Gateways to the internet: one, which every zone shares; one in each zone; or none at all."""
    private_endpoints: bool = True
    """Reach AWS's services from inside the network, without the gateway. S3 is always reached so."""
    connected_cidrs: tuple[Cidr, ...] = ()
    """Addresses of networks that are, or are to be, connected with this one: they must not overlap."""
    vpc_id: Annotated[NetworkId, Field(examples=["vpc-0123456789abcdef0"])] | None = None
    """Network that is there already. `vpc` of the cluster then names subnets and security groups of the machines, and
    nothing is made or changed in it but a security group for the file system."""
    control_plane_subnets: Annotated[tuple[NetworkId, ...], Field(max_length=16)] = ()
    """Of a network that is there: subnets in two zones or more, for a new EKS cluster."""


class Bucket(Config):
    """One bucket: made under a name that AWS chooses, made under this name, or there already."""

    name: BucketName | None = None
    """Name that it is made under."""
    existing: BucketName | None = None
    """A bucket that is there already: it is used, and not changed."""
    kms_key: KmsKey | None = None
    """Your own key that the existing bucket is encrypted with: ARN, id or alias. The roles that are made here may then
    use it, if its own policy admits roles of the account."""


class Buckets(Config):
    """Where data and checkpoints are. They outlive the cluster: deleting it leaves them and what is in them."""

    checkpoints: Bucket = Bucket()
    """Checkpoints. Below `jobs/` they are kept until the job itself removes them, whatever their age; below
    `milestones/` for ever, in cheaper storage; below `ephemeral/` for `ephemeral_days`."""
    data: Bucket = Bucket()
    """Training data, which jobs can read."""
    lifecycle: Bucket = Bucket()
    """Scripts for new machines; its name starts with `sagemaker-`. Only made where the cluster needs it. Every
    HyperPod role of the account can read it: no secrets."""
    logs: Bucket = Bucket()
    """Access logs of the other buckets."""
    ephemeral_days: PositiveInt = 14
    """Days after which what is below `ephemeral/` is removed."""
    noncurrent_days: PositiveInt = 3
    """Days for which what was overwritten or deleted can be had back."""
    multipart_days: PositiveInt = 2
    """Days after which an upload that nobody finished is removed."""
    log_days: PositiveInt = 90
    """Days for which access logs are kept."""


class Eks(Config):
    """The EKS cluster that is made; `eks_cluster_arn` of the cluster names one that is there instead."""

    version: Annotated[str, Field(pattern=r"^1\.\d{2}$", examples=["1.34"])] = "1.34"
    """Version of Kubernetes."""
    public_access: tuple[Cidr, ...] = ()
    """Addresses that may reach its API over the internet. Default: only from inside the network."""
    service_cidr: Cidr = "172.20.0.0/16"
    """Addresses of Kubernetes' services."""
    admins: tuple[RoleArn, ...] = ()
    """Roles that may do anything in it."""
    log_days: LogDays = 90
    """Days for which its control plane's logs are kept."""
    dependencies: Literal["external", "present"] = "external"
    """Who installs HyperPod's Helm chart, which must be there before the cluster: `hp-ext cluster deploy`, once EKS is
    there (`external`), or it is there already."""


class FileSystem(Config):
    """A file system of FSx for Lustre, in the zone of the machines. Nodes of Slurm mount it."""

    size_gib: Annotated[int, Field(ge=1200)] = 1200
    """Its size: 1200, or a multiple of 2400."""
    throughput: Literal[125, 250, 500, 1000] = 125
    """MB/s for each TiB."""
    path: Annotated[str, Field(pattern=r"^/[a-zA-Z0-9._/-]+$", max_length=1024)] = "/fsx"
    """Where nodes see it."""
    link_data: bool = False
    """Show the data bucket as the folder `data`, files loaded as they are read."""
    keep: bool = True
    """Keep it, at its cost, when the rest is deleted; the network it is in then stays too."""


class Team(Config):
    """Share of a team in the cluster. Its pods are in namespace `hyperpod-ns-NAME`."""

    name: Annotated[DnsLabel, Field(max_length=40, examples=["research"])]
    """Name of the team, at most 40 characters."""
    instance_type: Annotated[InstanceType, Field(examples=["ml.p5.48xlarge"])]
    """Machines that it has a quota of."""
    count: Annotated[NonNegativeInt, Field(examples=[4])]
    """So many of them."""
    weight: Annotated[NonNegativeInt, Field(le=100)] = 0
    """Its fair share of what is idle, beside those of others."""
    sharing: Literal["LendAndBorrow", "Lend", "DontLend"] = "LendAndBorrow"
    """Whether others may use what it leaves idle, and it what others leave."""


class PriorityClass(Config):
    """A level of priority that jobs can name."""

    name: Annotated[DnsLabel, Field(examples=["training"])]
    """Its name."""
    weight: Annotated[NonNegativeInt, Field(le=100, examples=[80])]
    """Higher goes first."""


class TaskGovernance(Config):
    """Quotas and priorities of teams, by AWS's add-on for Kueue."""

    teams: tuple[Team, ...] = ()
    """Teams with a quota each."""
    priorities: Annotated[tuple[PriorityClass, ...], Field(max_length=10)] = ()
    """Levels of priority. Default: first come, first served."""
    fair_share: bool = True
    """With `priorities`: share idle machines by the weights of teams, not first come, first served."""


class Observability(Config):
    """Metrics of nodes and jobs in Amazon Managed Prometheus, by AWS's add-on."""

    level: Literal["BASIC", "ADVANCED"] = "BASIC"
    """How much is measured. ADVANCED costs several times as much."""
    workspace_arn: (
        Annotated[str, Field(pattern=r"^arn:aws[a-z-]*:aps:[a-z0-9-]+:\d{12}:workspace/[a-zA-Z0-9-]+$")] | None
    ) = None
    """Workspace that is there already. Default: one is made."""


class AddOns(Config):
    """What runs in EKS beside jobs. Karpenter is `auto_scaling` of the cluster, AWS's memory tier `tiered_storage`."""

    cert_manager: bool = False
    """Certificates inside Kubernetes; the training operator needs it."""
    training_operator: bool = False
    """HyperPod's training operator, which target hyperpod-eks submits to."""
    task_governance: TaskGovernance | None = None
    """Quotas and priorities of teams."""
    observability: Observability | None = None
    """Metrics of nodes and jobs."""


class JobRole(Config):
    """A role for pods of one service account: they read data, and write checkpoints of their jobs and nothing else."""

    namespace: Annotated[DnsLabel, Field(examples=["hyperpod-ns-research"])]
    """Namespace of the service account."""
    service_account: Annotated[DnsLabel, Field(examples=["training"])]
    """Its name; a job names it as `kubernetes.service_account`."""
    jobs: Annotated[str, Field(pattern=r"^[a-z0-9][-a-z0-9]{0,61}\*?$", examples=["tiny-gpt"])]
    """Name of the job whose checkpoints it can write, or what several names begin with, and `*`: `research-*`."""


class Infrastructure(Config):
    """What is made around the cluster."""

    account: Annotated[str, Field(pattern=r"^\d{12}$", examples=["123456789012"])] | None = None
    """AWS account that all of it is in. Default: that of whoever deploys it."""
    network: Annotated[Network, Field(examples=[{"zones": ["usw2-az1", "usw2-az2"]}])]
    """The network."""
    buckets: Buckets = Buckets()
    """Where data and checkpoints are."""
    eks: Eks = Eks()
    """The EKS cluster; of no meaning with Slurm."""
    file_system: FileSystem | None = None
    """A shared file system."""
    add_ons: AddOns = AddOns()
    """What runs in EKS beside jobs."""
    job_roles: tuple[JobRole, ...] = ()
    """Roles of pods, on EKS. The first is the one that jobs which name the cluster get."""
    lifecycle_scripts: bool = True
    """With Slurm: new machines run our script once HyperPod's own set-up is done, unless their group names another."""
