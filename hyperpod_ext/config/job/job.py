"""JobConfig: the spec of a training job, for any target."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PlainValidator,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.budgets import LogRule, Relaunch, Timeouts
from hyperpod_ext.config.checkpoint import CheckpointPolicy
from hyperpod_ext.config.elastic import Elastic
from hyperpod_ext.config.fault_injection import Chaos
from hyperpod_ext.config.job.kubernetes import Kubernetes
from hyperpod_ext.config.job.overlay import Overlay
from hyperpod_ext.config.job.resources import Libraries, Resources
from hyperpod_ext.config.job.sagemaker import SageMaker
from hyperpod_ext.config.job.scheduling import NodeGroup, Scheduling
from hyperpod_ext.config.job.slurm import Slurm
from hyperpod_ext.config.job.volumes import Volume
from hyperpod_ext.config.metrics import Metrics
from hyperpod_ext.config.names import AbsolutePath, DnsLabel, EnvName, LabelKey, LabelValue
from hyperpod_ext.config.network import Network
from hyperpod_ext.config.restart import RestartPolicy


def _command(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list | tuple) and value and value[0] and all(isinstance(word, str) for word in value):
        return tuple(value)
    raise ValueError(
        'a command is a list of words, `[./train.sh, "4"]`, or a text for the shell; write numbers in quotes'
    )


Command = Annotated[str | tuple[str, ...], PlainValidator(_command, json_schema_input_type=str | list[str])]


class Rendezvous(Config):
    """Rendezvous of the nodes."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port on the first node. 0: any free port, if the target can choose one."""


class Parallelism(Config):
    """Ranks that share one copy of the model. The copies are data parallel."""

    tensor: PositiveInt = 1
    """Ranks that share each layer."""
    pipeline: PositiveInt = 1
    """Stages of layers."""
    context: PositiveInt = 1
    """Ranks that share each sequence."""

    @property
    def ranks_per_copy(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.pipeline * self.context


class JobConfig(Config):
    """One training job: its script, its machines, and its recovery from faults."""

    name: Annotated[DnsLabel, Field(examples=["tiny-gpt"])]
    """Name of the job: lower-case letters, digits and dashes, at most 63 characters."""
    script: Annotated[str, Field(examples=["train.py"])] = ""
    """Python file that trains, relative to this file."""
    command: Annotated[Command, Field(examples=[["./train.sh"]])] | None = None
    """Command to run instead of a script: words, or a text for the shell. The launcher starts it once for each worker,
    with the variables of its rank. Needs mode `plain`, because the command's processes do not use this project's
    runtime."""
    args: tuple[str, ...] = ()
    """Arguments of the script. Quote numbers, because arguments are text."""
    env: dict[EnvName, str] = {}
    """Environment of every worker. Do not put secrets here: the spec is stored and shown. The launcher sets variables
    that start with HPX_, except HPX_PORT_BASE, HPX_SOCKET_DIR, HPX_HYPERPODRUN_MODE and HPX_TERMINATION_LOG."""
    cluster: Annotated[str, Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}$", examples=["research"])] | None = None
    """Cluster of `hp-ext cluster deploy`. The cluster's outputs fill in unset fields: places of S3 tiers, and, for
    targets that need them, namespace, service account, queue, role, output, region, subnets and security groups."""
    image: Annotated[str, Field(min_length=1, examples=["1.dkr.ecr.us-west-2.amazonaws.com/train:1"])] | None = None
    """Container image, on targets that run containers. The script must be in it, or on a volume."""
    working_dir: AbsolutePath | None = None
    """Folder inside the container that `script` is relative to. The script's existence is then not checked. Default:
    the image's own folder, which must have the files of the spec's folder."""
    mode: Literal["ours", "plain", "run", "aws-checkpointless", "aws-managed-tier"] = "ours"
    """Recovery of the job: this project's runtime; a restart of a script that saves and resumes by itself (`run`); only
    its launcher (`plain`); AWS's checkpointless container; or AWS's managed tiered checkpointing in the script. AWS's
    two need HyperPod on EKS, and cannot be combined."""
    compat: Literal["aws"] | None = None
    """Packages of others that the script may import although this project replaces them. `aws`:
    hyperpod_checkpointless_training and hyperpod_elastic_agent, for scripts written for AWS's checkpointless and
    elastic training. Needs mode `ours` or `run`, and our agent."""
    nodes: Annotated[PositiveInt, Field(le=100_000)] = 1
    """Machines the job runs on; at most 100,000, more than a Kubernetes or Slurm cluster can have."""
    workers_per_node: Annotated[PositiveInt, Field(le=4096)] = 1
    """Processes on each machine, one per GPU; at most 4,096. World size is nodes x workers_per_node."""
    spares: NonNegativeInt = 0
    """Additional machines that stay idle until they replace a lost node. A job survives the loss of its first node if
    nodes and spares together are three or more: a majority must remain to elect another coordinator."""
    parallelism: Parallelism = Parallelism()
    """How the script divides its model among ranks. Only used for checks."""
    global_batch_size: PositiveInt | None = None
    """Samples in one optimizer step over all ranks; must divide evenly among them."""
    seed: NonNegativeInt = 0
    """Seed of random numbers. The random numbers of step s on rank r depend only on (seed, s, r), so that a recovered
    step repeats exactly."""
    shared_memory_mib: PositiveInt | None = None
    """Size of /dev/shm on each node, in MiB, for data loaders and NCCL. Container targets mount it, and every node
    checks it before the workers start."""
    process_group_backend: Literal["gloo", "nccl"] | None = None
    """Backend for collectives of GPU tensors; CPU tensors always use gloo. Default: NCCL if a worker sees a GPU,
    otherwise gloo."""
    resources: Resources = Resources()
    """Resources of each node."""
    libraries: Libraries = Libraries()
    """Versions of libraries in the image that determine its variables."""
    scheduling: Scheduling = Scheduling()
    """Placement of the nodes."""
    node_groups: tuple[NodeGroup, ...] = ()
    """Groups of nodes that differ in instance type or priority. Default: all nodes are equal."""
    volumes: tuple[Volume, ...] = ()
    """Volumes of the containers, in addition to their image."""
    elastic: Elastic | None = None
    """Numbers of nodes that the job may run on. Default: exactly `nodes`."""
    rendezvous: Rendezvous = Rendezvous()
    """Rendezvous of the nodes."""
    network: Network | None = None
    """Network for state, and its encryption. Default: the network over which a node reaches the first node, not
    encrypted."""
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    """Tiers for snapshots, and their intervals."""
    restart: RestartPolicy = RestartPolicy()
    """Recovery from faults."""
    relaunch: Relaunch = Relaunch()
    """Restarts of the whole job by the platform."""
    timeouts: Timeouts = Timeouts()
    """Limits on the time of the whole job."""
    metrics: Metrics | None = None
    """Metrics of the running job for Prometheus. Default: none."""
    log_rules: tuple[LogRule, ...] = ()
    """Patterns in rank 0's own output that detect a hang, a slow job or a fault. AWS's operator applies them on
    hyperpod-eks, our agent elsewhere. The script must print the lines itself, because `run.log` prints nothing."""
    labels: dict[LabelKey, LabelValue] = {}
    """Labels of the job and its pods; tags, if the platform has tags."""
    annotations: dict[LabelKey, str] = {}
    """Annotations of the job and its pods, on Kubernetes."""
    kubernetes: Kubernetes = Kubernetes()
    """Settings of Kubernetes."""
    slurm: Slurm = Slurm()
    """Settings of Slurm."""
    sagemaker: SageMaker = SageMaker()
    """Settings of SageMaker training jobs."""
    overlay: Overlay = Overlay()
    """Settings of the target that this spec has no field for, in the target's own format; applied last."""
    chaos: Chaos | None = None
    """Faults to inject. On targets that cost money only with `on_clusters`."""

    @model_validator(mode="after")
    def _starts_something(self) -> JobConfig:
        if not self.script and not self.command:
            missing = InitErrorDetails(type="missing", loc=("script",), input={})
            raise ValidationError.from_exception_data("JobConfig", [missing])
        return self

    @property
    def words(self) -> list[str]:
        """Words of the started program: script and arguments, or the command."""
        if self.command is None:
            return [self.script, *self.args]
        return ["/bin/sh", "-c", self.command] if isinstance(self.command, str) else list(self.command)

    @property
    def restarts_script(self) -> bool:
        """Whether a fault starts the script again on every rank."""
        return self.mode == "run"

    @property
    def has_agent(self) -> bool:
        """Whether our agent starts the workers."""
        return self.mode in ("ours", "run")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.workers_per_node

    @property
    def spares_in_all(self) -> int:
        """Number of spares of the job, or of all its groups."""
        return self.spares or sum(group.spares for group in self.node_groups)
