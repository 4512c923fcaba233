"""Section of a cluster's spec with the AWS resources that the CDK app in `cdk/` creates: network, buckets, EKS, file
system, add-ons and roles of jobs."""

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
"""Retention periods that CloudWatch Logs accepts, in days."""


class Network(Config):
    """The VPC of the cluster: a new VPC, or with `vpc_id` an existing one."""

    cidr: Cidr = "10.192.0.0/16"
    """IP range of the new VPC, from /16 to /20. The machines of each zone get a quarter of the range."""
    zones: Annotated[tuple[Zone, ...], Field(max_length=3, examples=[["usw2-az1", "usw2-az2"]])] = ()
    """Availability zones of the new VPC, all by id or all by name; EKS needs two zones. Machines are placed in the
    first zone, so put the zone of your capacity first. Zones that are appended to the list later do not change the
    existing zones."""
    group_zones: dict[ZonedGroup, Zone] = {}
    """Availability zones of instance groups that are not in the first zone, by the name of the group."""
    nat: Literal["one", "per-zone", "none"] = "one"
    """NAT gateways to the internet: one gateway that all zones share, one gateway in each zone, or no gateway."""
    private_endpoints: bool = True
    """Whether the network gets VPC endpoints for AWS's services, so that traffic to these services needs no NAT
    gateway. S3 has a VPC endpoint in any case."""
    connected_cidrs: tuple[Cidr, ...] = ()
    """IP ranges of networks that are or will be connected to the cluster's network. The IP ranges of connected networks
    must not overlap with the range of the cluster's network."""
    vpc_id: Annotated[NetworkId, Field(examples=["vpc-0123456789abcdef0"])] | None = None
    """Id of an existing VPC to use. With `vpc_id`, the cluster's `vpc` must name subnets and security groups of the
    machines. Only a security group for the file system is added to the existing VPC."""
    control_plane_subnets: Annotated[tuple[NetworkId, ...], Field(max_length=16)] = ()
    """Ids of subnets of the existing VPC, in at least two zones, for the control plane of a new EKS cluster."""


class Bucket(Config):
    """An S3 bucket: a new bucket, with a name that AWS or you choose, or an existing bucket."""

    name: BucketName | None = None
    """Name of the new bucket. None: AWS chooses the name."""
    existing: BucketName | None = None
    """Name of an existing bucket, which is used and not changed."""
    kms_key: KmsKey | None = None
    """KMS key that encrypts the existing bucket: ARN, id or alias. The roles that `hp-ext cluster deploy` creates can
    use the key if the key's policy allows roles of the account."""


class Buckets(Config):
    """S3 buckets for data and checkpoints. The buckets and their objects are kept when the cluster is deleted."""

    checkpoints: Bucket = Bucket()
    """Bucket for checkpoints. Objects below `jobs/` are kept until the job removes them. Objects below `milestones/`
    are kept for ever, in cheaper storage. Objects below `ephemeral/` are kept for `ephemeral_days`."""
    data: Bucket = Bucket()
    """Bucket for training data, which jobs can read."""
    lifecycle: Bucket = Bucket()
    """Bucket for scripts that new machines run; the bucket's name starts with `sagemaker-`. The bucket is only created
    if the cluster needs it. Every HyperPod role of the account can read the bucket, so the bucket must not contain
    secrets."""
    logs: Bucket = Bucket()
    """Bucket for access logs of the buckets for checkpoints, data and lifecycle scripts."""
    ephemeral_days: PositiveInt = 14
    """Days after which S3 removes objects below `ephemeral/`."""
    noncurrent_days: PositiveInt = 3
    """Days during which overwritten or deleted objects can be restored."""
    multipart_days: PositiveInt = 2
    """Days after which S3 removes the parts of an unfinished multipart upload."""
    log_days: PositiveInt = 90
    """Days for which access logs are kept."""


class Eks(Config):
    """Settings of the new EKS cluster. To use an existing EKS cluster, set `eks_cluster_arn` of the cluster."""

    version: Annotated[str, Field(pattern=r"^1\.\d{2}$", examples=["1.34"])] = "1.34"
    """Version of Kubernetes."""
    public_access: tuple[Cidr, ...] = ()
    """IP ranges that may reach the Kubernetes API over the internet. Default: none; the API is reachable only from
    inside the VPC."""
    service_cidr: Cidr = "172.20.0.0/16"
    """IP range of Kubernetes services."""
    admins: tuple[RoleArn, ...] = ()
    """ARNs of IAM roles with administrator access to the EKS cluster."""
    log_days: LogDays = 90
    """Days for which the control plane's logs are kept."""
    dependencies: Literal["external", "present"] = "external"
    """State of HyperPod's Helm chart, which the cluster needs. `external`: `hp-ext cluster deploy` installs the chart
    after it has created the EKS cluster. `present`: the chart is installed already."""


class FileSystem(Config):
    """An FSx for Lustre file system in the availability zone of the machines. Slurm nodes mount the file system."""

    size_gib: Annotated[int, Field(ge=1200)] = 1200
    """Size in GiB: 1200, or a multiple of 2400."""
    throughput: Literal[125, 250, 500, 1000] = 125
    """Throughput in MB/s per TiB of storage."""
    path: Annotated[str, Field(pattern=r"^/[a-zA-Z0-9._/-]+$", max_length=1024)] = "/fsx"
    """Mount path on the nodes."""
    link_data: bool = False
    """Whether the file system shows the data bucket as its folder `data`. Each file is loaded from S3 when it is first
    read."""
    keep: bool = True
    """Whether the file system is kept, and still costs money, when the cluster's other resources are deleted. With
    `keep`, the network of the file system is kept, too."""


class Team(Config):
    """A team and its quota in the cluster. The team's pods run in the namespace `hyperpod-ns-NAME`."""

    name: Annotated[DnsLabel, Field(max_length=40, examples=["research"])]
    """Name of the team, at most 40 characters."""
    instance_type: Annotated[InstanceType, Field(examples=["ml.p5.48xlarge"])]
    """Instance type of the quota."""
    count: Annotated[NonNegativeInt, Field(examples=[4])]
    """Number of machines in the quota."""
    weight: Annotated[NonNegativeInt, Field(le=100)] = 0
    """Weight of the team when idle machines are shared among teams. 0 is the lowest weight."""
    sharing: Literal["LendAndBorrow", "Lend", "DontLend"] = "LendAndBorrow"
    """Whether the team lends its idle machines to other teams, and borrows idle machines of other teams."""


class PriorityClass(Config):
    """A level of priority that jobs can name."""

    name: Annotated[DnsLabel, Field(examples=["training"])]
    """Name of the priority."""
    weight: Annotated[NonNegativeInt, Field(le=100, examples=[80])]
    """Priority of the class: jobs whose class has a higher weight start first."""


class TaskGovernance(Config):
    """Quotas and priorities of teams, which AWS's add-on for Kueue enforces."""

    teams: tuple[Team, ...] = ()
    """Teams, each with a quota of machines."""
    priorities: Annotated[tuple[PriorityClass, ...], Field(max_length=10)] = ()
    """Priority classes that jobs can name. Without priority classes, jobs run in the order of submission."""
    fair_share: bool = True
    """With `priorities`: whether idle machines are shared by the weights of teams. False: jobs get idle machines in the
    order of submission."""


class Observability(Config):
    """Metrics of nodes and jobs in Amazon Managed Prometheus, which AWS's observability add-on collects."""

    level: Literal["BASIC", "ADVANCED"] = "BASIC"
    """Amount of metrics. ADVANCED costs several times as much as BASIC."""
    workspace_arn: (
        Annotated[str, Field(pattern=r"^arn:aws[a-z-]*:aps:[a-z0-9-]+:\d{12}:workspace/[a-zA-Z0-9-]+$")] | None
    ) = None
    """ARN of an existing workspace of Amazon Managed Prometheus. Default: a new workspace."""


class AddOns(Config):
    """Add-ons of the EKS cluster. Karpenter is configured by the cluster's field `auto_scaling`, and AWS's memory tier
    by `tiered_storage`."""

    cert_manager: bool = False
    """Whether to install cert-manager, which issues certificates inside Kubernetes. The training operator needs
    cert-manager."""
    training_operator: bool = False
    """Whether to install HyperPod's training operator, to which the target hyperpod-eks submits jobs."""
    task_governance: TaskGovernance | None = None
    """Quotas and priorities of teams."""
    observability: Observability | None = None
    """Metrics of nodes and jobs."""


class JobRole(Config):
    """An IAM role for the pods of one service account. The pods can read training data, and write only the checkpoints
    of the jobs in `jobs`."""

    namespace: Annotated[DnsLabel, Field(examples=["hyperpod-ns-research"])]
    """Namespace of the service account."""
    service_account: Annotated[DnsLabel, Field(examples=["training"])]
    """Name of the service account. Jobs name the service account in `kubernetes.service_account`."""
    jobs: Annotated[str, Field(pattern=r"^[a-z0-9][-a-z0-9]{0,61}\*?$", examples=["tiny-gpt"])]
    """Name of the job whose checkpoints the role can write. A `*` at the end allows all names with that prefix, such as
    `research-*`."""


class Infrastructure(Config):
    """AWS resources that `hp-ext cluster deploy` creates for the cluster."""

    account: Annotated[str, Field(pattern=r"^\d{12}$", examples=["123456789012"])] | None = None
    """AWS account of all resources. Default: the account of the credentials."""
    network: Annotated[Network, Field(examples=[{"zones": ["usw2-az1", "usw2-az2"]}])]
    """The VPC of the cluster."""
    buckets: Buckets = Buckets()
    """S3 buckets for data and checkpoints."""
    eks: Eks = Eks()
    """Settings of the new EKS cluster. Ignored with `orchestrator: slurm`."""
    file_system: FileSystem | None = None
    """A shared FSx for Lustre file system. None: no file system."""
    add_ons: AddOns = AddOns()
    """Add-ons of EKS."""
    job_roles: tuple[JobRole, ...] = ()
    """IAM roles for pods, on EKS. Jobs with `cluster` set to this cluster use the first role by default."""
    lifecycle_scripts: bool = True
    """With `orchestrator: slurm`: whether new machines run this project's lifecycle script after HyperPod's own set-up.
    Groups with `lifecycle` run the scripts in `lifecycle` instead.
    """
