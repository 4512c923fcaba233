"""Settings of SageMaker training jobs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.names import AbsolutePath

S3Uri = Annotated[str, Field(pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?$", examples=["s3://bucket/prefix"])]
RoleArn = Annotated[
    str,
    Field(
        pattern=r"^arn:aws[a-z-]*:iam::\d{12}:role/?[a-zA-Z_0-9+=,.@/-]+$",
        examples=["arn:aws:iam::123456789012:role/training"],
    ),
]
SecretId = Annotated[str, Field(pattern=r"^[A-Za-z0-9/_+=.@:-]{1,512}$")]
KmsKey = Annotated[str, Field(pattern=r"^[a-zA-Z0-9:/_-]{1,2048}$")]
NetworkId = Annotated[str, Field(pattern=r"^[-0-9a-zA-Z]{1,32}$")]
ChannelName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="letters, digits, dots, dashes and underscores, at most 64"),
]


def _not_of_aws(key: str) -> str:
    if key.lower().startswith("aws:"):
        raise ValueError("keys that begin with aws: are reserved for AWS")
    return key


TagKey = Annotated[
    str,
    Field(
        pattern=r"^[\w .:/=+@-]+$",
        max_length=128,
        description="a tag's key: letters, digits and _ . : / = + @ -, at most 128",
    ),
    AfterValidator(_not_of_aws),
]
TagValue = Annotated[str, Field(pattern=r"^[\w .:/=+@-]*$", max_length=256)]


class S3Channel(Config):
    """Input from S3, as a folder on every node."""

    kind: Literal["s3"] = "s3"
    uri: S3Uri
    """Prefix or manifest in S3."""
    data: Literal["S3Prefix", "ManifestFile", "AugmentedManifestFile"] = "S3Prefix"
    """Kind of `uri`."""
    distribution: Literal["FullyReplicated", "ShardedByS3Key"] = "FullyReplicated"
    """Whether every node gets all data or a part."""
    mode: Literal["File", "FastFile", "Pipe"] = "FastFile"
    """Whether data is downloaded before the job starts, read on demand, or read as a pipe."""
    content_type: Annotated[str, Field(pattern=r"^[^\n\x00]{1,256}$")] | None = None
    """MIME type of the data."""
    compression: Literal["None", "Gzip"] | None = None
    """How the data is compressed."""


class FileSystemChannel(Config):
    """Input from a file system of the job's VPC."""

    kind: Literal["file-system"] = "file-system"
    id: Annotated[str, Field(pattern=r"^fs-[0-9a-f]{8,18}$", examples=["fs-0123456789abcdef0"])]
    """Id of the file system."""
    type: Literal["EFS", "FSxLustre"] = "FSxLustre"
    """Type of the file system."""
    directory: Annotated[AbsolutePath, Field(examples=["/fsx/data"])]
    """Folder in the file system."""
    access: Literal["ro", "rw"] = "ro"
    """Whether the job may write to it."""


Channel = Annotated[S3Channel | FileSystemChannel, Field(discriminator="kind")]


class Vpc(Config):
    """Network of the job's nodes."""

    subnets: Annotated[
        tuple[NetworkId, ...], Field(min_length=1, max_length=16, examples=[["subnet-0123456789abcdef0"]])
    ]
    """Subnets; the nodes are placed in one of them."""
    security_groups: Annotated[
        tuple[NetworkId, ...], Field(min_length=1, max_length=5, examples=[["sg-0123456789abcdef0"]])
    ]
    """Security groups, which must allow traffic between the job's nodes."""


class Metric(Config):
    """A number that SageMaker reads from the job's output."""

    name: Annotated[str, Field(pattern=r"^.{1,255}$", examples=["loss"])]
    """Name of the metric."""
    regex: Annotated[str, Field(pattern=r"^.{1,500}$", examples=["loss ([0-9.]+)"])]
    """Regular expression; its group is the number."""


class Experiment(Config):
    """Experiment of the job in SageMaker Experiments."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,119}$", examples=["tiny-gpt"])]
    """Name of the experiment."""
    trial: Annotated[str, Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,119}$")] | None = None
    """Name of the trial in the experiment."""
    run: Annotated[str, Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,119}$")] | None = None
    """Name of the run in the trial."""


class SageMaker(Config):
    """Settings of SageMaker training jobs."""

    region: Annotated[str, Field(pattern=r"^[a-z]{2,4}(-[a-z]+)+-\d$", examples=["us-west-2"])] | None = None
    """AWS region of the job. Default: the region of the AWS configuration."""
    role: RoleArn | None = None
    """Role of the job's nodes. Required."""
    output: S3Uri | None = None
    """S3 prefix for the code before the job, and for `/opt/ml/model` after the job. Required."""
    code: S3Uri | None = None
    """Archive (`.tar.gz`) with the script. Default: the script's folder is uploaded below `output` at submission."""
    secret: SecretId | None = None
    """Secret in Secrets Manager that authenticates the nodes and signs checkpoints: its name or ARN. The role must be
    allowed to read it. Default: `hyperpod_ext/NAME-OF-THE-JOB`, made with random bytes when the job is first
    submitted."""
    channels: dict[ChannelName, Channel] = {}
    """Inputs, each a folder `/opt/ml/input/data/NAME`."""
    volume_gib: PositiveInt | None = None
    """Disk of each node, for instance types without local disks."""
    volume_kms_key: KmsKey | None = None
    """Key that encrypts the disks."""
    output_kms_key: KmsKey | None = None
    """Key that encrypts the output."""
    compress_output: bool = True
    """Whether the output is one archive. False: single files."""
    keep_alive_s: Annotated[NonNegativeInt, Field(le=21600)] | None = None
    """Seconds to keep the nodes after the job in a warm pool, for a similar next job."""
    training_plan: (
        Annotated[str, Field(pattern=r"^arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:\d{12}:training-plan/.+$")] | None
    ) = None
    """Training plan of the nodes."""
    spot: bool = False
    """Use spot capacity, which can be taken away. The job then resumes from its newest durable checkpoint."""
    max_wait_s: PositiveInt | None = None
    """With `spot`: seconds for waiting and running in total; at least timeouts.run_s."""
    max_pending_s: Annotated[int, Field(ge=1800, le=2419200)] | None = None
    """Seconds that the job may wait for nodes."""
    checkpoint_uri: S3Uri | None = None
    """Prefix that SageMaker keeps equal to `checkpoint_path`, for scripts that save there. Tiers of `checkpoint` do not
    use it: they write to S3 directly."""
    checkpoint_path: AbsolutePath = "/opt/ml/checkpoints"
    """Folder on each node for `checkpoint_uri`."""
    vpc: Vpc | None = None
    """Network of the nodes. Default: SageMaker's network."""
    network_isolation: bool = False
    """Allow no network traffic except channels and output. The runtime's S3 tier and secrets are then unreachable."""
    encrypt_traffic: bool = False
    """Encrypt traffic between the nodes. Slows collectives down."""
    metrics: Annotated[tuple[Metric, ...], Field(max_length=40)] = ()
    """Numbers to read from the job's output."""
    experiment: Experiment | None = None
    """Experiment of the job."""
    profiler: bool = False
    """Whether SageMaker profiles the job."""
    remote_debug: bool = False
    """Whether shells on the nodes through SSM are allowed."""
    infra_check: bool = False
    """Let SageMaker test GPUs and network before the job starts."""
    install: tuple[Annotated[str, Field(pattern=r"^[^\s'\"]{1,200}$", examples=["hyperpod-ext[runtime,s3]"])], ...] = ()
    """Packages that pip installs on every node before the job starts, if the image lacks them."""
    tags: dict[TagKey, TagValue] = {}
    """Tags of the job, in addition to `labels`."""
