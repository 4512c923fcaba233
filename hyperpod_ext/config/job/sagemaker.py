"""Section of a job's spec with settings of SageMaker training jobs."""

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
        raise ValueError("keys that begin with `aws:` are reserved for AWS; use another key")
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
    """Input data from S3, which every node sees as a folder."""

    kind: Literal["s3"] = "s3"
    uri: S3Uri
    """S3 URI of a prefix or of a manifest file."""
    data: Literal["S3Prefix", "ManifestFile", "AugmentedManifestFile"] = "S3Prefix"
    """What `uri` names: a prefix, a manifest file or an augmented manifest file."""
    distribution: Literal["FullyReplicated", "ShardedByS3Key"] = "FullyReplicated"
    """`FullyReplicated`: every node gets all data. `ShardedByS3Key`: every node gets a part of the data."""
    mode: Literal["File", "FastFile", "Pipe"] = "FastFile"
    """`File`: data is downloaded before the job starts. `FastFile`: data is read on demand. `Pipe`: data is read as a
    pipe."""
    content_type: Annotated[str, Field(pattern=r"^[^\n\x00]{1,256}$")] | None = None
    """MIME type of the data."""
    compression: Literal["None", "Gzip"] | None = None
    """Compression of the data in S3."""


class FileSystemChannel(Config):
    """Input data from a file system in the job's VPC."""

    kind: Literal["file-system"] = "file-system"
    id: Annotated[str, Field(pattern=r"^fs-[0-9a-f]{8,18}$", examples=["fs-0123456789abcdef0"])]
    """Id of the file system."""
    type: Literal["EFS", "FSxLustre"] = "FSxLustre"
    """Type of the file system."""
    directory: Annotated[AbsolutePath, Field(examples=["/fsx/data"])]
    """Folder in the file system."""
    access: Literal["ro", "rw"] = "ro"
    """Access of the job to the file system: `ro` for reading only, `rw` for reading and writing."""


Channel = Annotated[S3Channel | FileSystemChannel, Field(discriminator="kind")]


class Vpc(Config):
    """VPC subnets and security groups of the nodes."""

    subnets: Annotated[
        tuple[NetworkId, ...], Field(min_length=1, max_length=16, examples=[["subnet-0123456789abcdef0"]])
    ]
    """Ids of subnets. AWS places the nodes in one of the subnets."""
    security_groups: Annotated[
        tuple[NetworkId, ...], Field(min_length=1, max_length=5, examples=[["sg-0123456789abcdef0"]])
    ]
    """Ids of security groups. The security groups must allow traffic between the nodes."""


class Metric(Config):
    """A metric whose values SageMaker reads from the job's output."""

    name: Annotated[str, Field(pattern=r"^.{1,255}$", examples=["loss"])]
    """Name of the metric."""
    regex: Annotated[str, Field(pattern=r"^.{1,500}$", examples=["loss ([0-9.]+)"])]
    """Regular expression for a line of the output. The group of the expression is the value of the metric."""


class Experiment(Config):
    """Names under which SageMaker Experiments lists the job."""

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
    """IAM role of the job's nodes. Required on target sagemaker."""
    output: S3Uri | None = None
    """S3 prefix to which the code is uploaded before the job, and the content of `/opt/ml/model` after the job.
    Required on target sagemaker."""
    code: S3Uri | None = None
    """S3 URI of an archive (`.tar.gz`) with the script. Default: `hp-ext` uploads the script's folder below `output`
    when the job is submitted."""
    secret: SecretId | None = None
    """Name or ARN of the secret in Secrets Manager that authenticates the nodes and signs checkpoints. The role `role`
    must be allowed to read the secret. Default: `hyperpod_ext/NAME-OF-THE-JOB`, which is created with random bytes when
    the job is first submitted."""
    channels: dict[ChannelName, Channel] = {}
    """Inputs of the job by name. Each input is a folder `/opt/ml/input/data/NAME`."""
    volume_gib: PositiveInt | None = None
    """Size in GiB of the EBS disk of each node, for instance types without local disks."""
    volume_kms_key: KmsKey | None = None
    """KMS key that encrypts the disks of the nodes."""
    output_kms_key: KmsKey | None = None
    """KMS key that encrypts the output in S3."""
    compress_output: bool = True
    """Whether the output is stored as one compressed archive. False: the output is stored as single files."""
    keep_alive_s: Annotated[NonNegativeInt, Field(le=21600)] | None = None
    """Seconds for which the nodes are kept in a warm pool after the job, so that a similar job can start on them
    sooner."""
    training_plan: (
        Annotated[str, Field(pattern=r"^arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:\d{12}:training-plan/.+$")] | None
    ) = None
    """ARN of the training plan that the nodes come from."""
    spot: bool = False
    """Whether to use Spot capacity, which AWS can take away. After an interruption, the job resumes from its newest
    durable checkpoint."""
    max_wait_s: PositiveInt | None = None
    """Maximum seconds that a job with `spot` may wait for nodes and run, in total. The value must be at least
    `timeouts.run_s`."""
    max_pending_s: Annotated[int, Field(ge=1800, le=2419200)] | None = None
    """Maximum seconds that the job may wait for nodes."""
    checkpoint_uri: S3Uri | None = None
    """S3 prefix that SageMaker synchronises with the folder `checkpoint_path`, for scripts that save checkpoints in the
    folder. The tiers in `checkpoint` do not use this prefix, because they write to S3 directly."""
    checkpoint_path: AbsolutePath = "/opt/ml/checkpoints"
    """Folder on each node that SageMaker synchronises with `checkpoint_uri`."""
    vpc: Vpc | None = None
    """VPC subnets and security groups of the nodes. Default: a network of SageMaker."""
    network_isolation: bool = False
    """Whether nodes have no network access except for channels and output. With network isolation, the runtime can
    reach neither its S3 tier nor its secret."""
    encrypt_traffic: bool = False
    """Whether SageMaker encrypts traffic between the nodes. Encryption of this traffic slows collectives down."""
    metrics: Annotated[tuple[Metric, ...], Field(max_length=40)] = ()
    """Metrics whose values SageMaker reads from the job's output."""
    experiment: Experiment | None = None
    """Names under which SageMaker Experiments lists the job."""
    profiler: bool = False
    """Whether SageMaker profiles the job."""
    remote_debug: bool = False
    """Whether users may open a shell on the nodes through AWS Systems Manager (SSM)."""
    infra_check: bool = False
    """Whether SageMaker tests the GPUs and the network before the job starts."""
    install: tuple[Annotated[str, Field(pattern=r"^[^\s'\"]{1,200}$", examples=["hyperpod-ext[runtime,s3]"])], ...] = ()
    """Packages that pip installs on every node before the job starts, because the image lacks these packages."""
    tags: dict[TagKey, TagValue] = {}
    """AWS tags of the job, in addition to the tags from `labels`."""
