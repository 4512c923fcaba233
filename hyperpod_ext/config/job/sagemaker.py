"""What only SageMaker training jobs have."""

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
    """Input from S3, which every node sees as a folder."""

    kind: Literal["s3"] = "s3"
    uri: S3Uri
    """Prefix, or manifest."""
    data: Literal["S3Prefix", "ManifestFile", "AugmentedManifestFile"] = "S3Prefix"
    """What `uri` names."""
    distribution: Literal["FullyReplicated", "ShardedByS3Key"] = "FullyReplicated"
    """All of it on every node, or a part on each."""
    mode: Literal["File", "FastFile", "Pipe"] = "FastFile"
    """Downloaded before the job starts, read on demand, or as a pipe."""
    content_type: Annotated[str, Field(pattern=r"^[^\n\x00]{1,256}$")] | None = None
    """MIME type of the data."""
    compression: Literal["None", "Gzip"] | None = None
    """How the data is compressed."""


class FileSystemChannel(Config):
    """Input from a file system of the job's VPC."""

    kind: Literal["file-system"] = "file-system"
    id: Annotated[str, Field(pattern=r"^fs-[0-9a-f]{8,18}$", examples=["fs-0123456789abcdef0"])]
    """The file system."""
    type: Literal["EFS", "FSxLustre"] = "FSxLustre"
    """What it is."""
    directory: Annotated[AbsolutePath, Field(examples=["/fsx/data"])]
    """Folder in it."""
    access: Literal["ro", "rw"] = "ro"
    """Whether the job may write to it."""


Channel = Annotated[S3Channel | FileSystemChannel, Field(discriminator="kind")]


class Vpc(Config):
    """The network that the job's nodes are in."""

    subnets: Annotated[
        tuple[NetworkId, ...], Field(min_length=1, max_length=16, examples=[["subnet-0123456789abcdef0"]])
    ]
    """Subnets; the nodes are put in one of them."""
    security_groups: Annotated[
        tuple[NetworkId, ...], Field(min_length=1, max_length=5, examples=[["sg-0123456789abcdef0"]])
    ]
    """Security groups; the nodes of the job must be let through to each other."""


class Metric(Config):
    """A number that SageMaker reads from what the job prints."""

    name: Annotated[str, Field(pattern=r"^.{1,255}$", examples=["loss"])]
    """Name of the metric."""
    regex: Annotated[str, Field(pattern=r"^.{1,500}$", examples=["loss ([0-9.]+)"])]
    """Regular expression; its group is the number."""


class Experiment(Config):
    """Where the job is filed in SageMaker Experiments."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,119}$", examples=["tiny-gpt"])]
    """The experiment."""
    trial: Annotated[str, Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,119}$")] | None = None
    """The trial in it."""
    run: Annotated[str, Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,119}$")] | None = None
    """The run in it."""


class SageMaker(Config):
    """What only SageMaker training jobs have."""

    region: Annotated[str, Field(pattern=r"^[a-z]{2,4}(-[a-z]+)+-\d$", examples=["us-west-2"])] | None = None
    """AWS region of the job. Default: that of the AWS configuration."""
    role: RoleArn | None = None
    """Role that the job's nodes have. Needed."""
    output: S3Uri | None = None
    """Where `/opt/ml/model` goes at the end, and where the code is put before the start. Needed."""
    code: S3Uri | None = None
    """Archive (`.tar.gz`) that holds the script. Default: the script's folder is put below `output` at submission."""
    secret: SecretId | None = None
    """Secret in Secrets Manager that the nodes know each other by, and that checkpoints are signed with: its name
    or ARN; the role must be allowed to read it. Default: `hyperpod_ext/NAME-OF-THE-JOB`, made with random bytes
    when the job is first submitted."""
    channels: dict[ChannelName, Channel] = {}
    """Inputs, each a folder `/opt/ml/input/data/NAME`."""
    volume_gib: PositiveInt | None = None
    """Disk of each node, for instance types without one of their own."""
    volume_kms_key: KmsKey | None = None
    """Key that the disks are encrypted with."""
    output_kms_key: KmsKey | None = None
    """Key that the output is encrypted with."""
    compress_output: bool = True
    """Whether the output is one archive. False: files as they are."""
    keep_alive_s: Annotated[NonNegativeInt, Field(le=21600)] | None = None
    """Seconds that the nodes are kept after the job, for the next one like it: a warm pool."""
    training_plan: (
        Annotated[str, Field(pattern=r"^arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:\d{12}:training-plan/.+$")] | None
    ) = None
    """Training plan that the nodes come from."""
    spot: bool = False
    """Use spare capacity, which can be taken away; the job then goes on from its newest durable checkpoint."""
    max_wait_s: PositiveInt | None = None
    """With `spot`: seconds for waiting and running together; at least timeouts.run_s."""
    max_pending_s: Annotated[int, Field(ge=1800, le=2419200)] | None = None
    """Seconds that the job may wait for nodes."""
    checkpoint_uri: S3Uri | None = None
    """Prefix that SageMaker keeps equal to `checkpoint_path`, for scripts that save there by themselves. Tiers of
    `checkpoint` need it not: they write to S3 on their own."""
    checkpoint_path: AbsolutePath = "/opt/ml/checkpoints"
    """The folder on each node that goes with `checkpoint_uri`."""
    vpc: Vpc | None = None
    """Network of the nodes. Default: SageMaker's own."""
    network_isolation: bool = False
    """Let nothing in or out but the channels and the output. The runtime's S3 tier, and secrets, cannot be reached
    then."""
    encrypt_traffic: bool = False
    """Encrypt what the nodes say to each other; slows collectives down."""
    metrics: Annotated[tuple[Metric, ...], Field(max_length=40)] = ()
    """Numbers to read from what the job prints."""
    experiment: Experiment | None = None
    """Where the job is filed."""
    profiler: bool = False
    """Whether SageMaker profiles the job."""
    remote_debug: bool = False
    """Whether one may open a shell on the nodes through SSM."""
    infra_check: bool = False
    """Have SageMaker test GPUs and network before the job starts."""
    install: tuple[Annotated[str, Field(pattern=r"^[^\s'\"]{1,200}$", examples=["hyperpod-ext[runtime,s3]"])], ...] = ()
    """What pip installs on every node before the job starts, where the image lacks it."""
    tags: dict[TagKey, TagValue] = {}
    """Tags of the job, besides `labels`."""
