"""JobConfig: one training job, as its author asks for it. It knows no target."""

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
    raise ValueError('a command is a list of words, `[./train.sh, "4"]`, or a text for the shell; numbers go in quotes')


Command = Annotated[str | tuple[str, ...], PlainValidator(_command, json_schema_input_type=str | list[str])]


class Rendezvous(Config):
    """Where the nodes meet."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port on the first node. 0: any free one, where the target can choose."""


class Parallelism(Config):
    """Ranks that share one copy of the model. What is left of the world size is data parallelism."""

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
    """One training job: what runs, on how many machines, and what happens when one fails."""

    name: Annotated[DnsLabel, Field(examples=["tiny-gpt"])]
    """Name of the job: lower-case letters, digits and dashes, at most 63 characters."""
    script: Annotated[str, Field(examples=["train.py"])] = ""
    """Python file that trains, relative to this file."""
    command: Annotated[Command, Field(examples=[["./train.sh"]])] | None = None
    """What runs instead of a script: words, or a text for the shell. It is started once for each worker, with the
    variables of its rank. Needs mode `plain`: nothing of this project is in its processes."""
    args: tuple[str, ...] = ()
    """Arguments of the script. Quote numbers: they reach the script as text."""
    env: dict[EnvName, str] = {}
    """Environment of every worker. No secrets: the spec is stored and shown. Names that start with HPX_ are the
    launcher's, but for HPX_PORT_BASE, HPX_SOCKET_DIR, HPX_HYPERPODRUN_MODE and HPX_TERMINATION_LOG."""
    cluster: Annotated[str, Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}$", examples=["research"])] | None = None
    """Cluster that `hp-ext cluster deploy` made. Its outputs settle what is left open here: where S3 tiers are, and, as
    the target needs them, namespace, service account, queue, role, output, region, subnets and security groups."""
    image: Annotated[str, Field(min_length=1, examples=["1.dkr.ecr.us-west-2.amazonaws.com/train:1"])] | None = None
    """Container image, on targets that run containers. The script must be in it, or on a volume."""
    working_dir: AbsolutePath | None = None
    """Folder inside the container that `script` is relative to; it is then not looked for here. Default: the image's
    own, which must hold what this folder holds."""
    mode: Literal["ours", "plain", "aws-checkpointless", "aws-managed-tier"] = "ours"
    """What recovers the job: this project's runtime; nothing but its launcher (`plain`); AWS's checkpointless
    container; or AWS's managed tiered checkpointing in the script. AWS's two are for HyperPod on EKS, and do not
    combine with each other."""
    nodes: Annotated[PositiveInt, Field(le=100_000)] = 1
    """Machines the job runs on; at most 100,000, more than a Kubernetes or Slurm cluster can have."""
    workers_per_node: Annotated[PositiveInt, Field(le=4096)] = 1
    """Processes on each machine, one a GPU; at most 4,096. World size is nodes x workers_per_node."""
    spares: NonNegativeInt = 0
    """Machines beside those, ready and without work until one of them is lost. Nodes and spares decide by
    majority who goes on: to survive the loss of the first node, have three of them or more."""
    parallelism: Parallelism = Parallelism()
    """How the script splits its model over ranks; only checked."""
    global_batch_size: PositiveInt | None = None
    """Samples in one optimizer step over all ranks; must divide evenly among them."""
    seed: NonNegativeInt = 0
    """Random numbers of step s on rank r follow from (seed, s, r) alone, so that a recovered step
    repeats exactly."""
    shared_memory_mib: PositiveInt | None = None
    """Size /dev/shm must have on each node, in MiB, for data loaders and NCCL. Container targets
    mount it; every node checks it before the workers start."""
    process_group_backend: Literal["gloo", "nccl"] | None = None
    """What collectives of GPU tensors go through; those of CPU tensors always go through gloo. Default: NCCL where a
    worker sees a GPU, else gloo."""
    resources: Resources = Resources()
    """What each node must have."""
    libraries: Libraries = Libraries()
    """Versions in the image that the environment depends on."""
    scheduling: Scheduling = Scheduling()
    """When and where the nodes are placed."""
    node_groups: tuple[NodeGroup, ...] = ()
    """Nodes that differ from one another, by instance type or priority. Default: all are alike."""
    volumes: tuple[Volume, ...] = ()
    """Files and memory that the containers see, besides their image."""
    elastic: Elastic | None = None
    """How the job may go on with fewer nodes, or take more. Default: only with exactly `nodes`."""
    rendezvous: Rendezvous = Rendezvous()
    """Where the nodes meet."""
    network: Network | None = None
    """Which network state goes over, and whether it is encrypted. Default: that by which a node reaches the first one,
    not encrypted."""
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    """Where snapshots go, and how often."""
    restart: RestartPolicy = RestartPolicy()
    """What happens after a fault."""
    relaunch: Relaunch = Relaunch()
    """When the platform starts the whole job anew, and how often."""
    timeouts: Timeouts = Timeouts()
    """Limits on the time of the whole job."""
    metrics: Metrics | None = None
    """Where the numbers of the running job can be read, for Prometheus. Default: nowhere."""
    log_rules: tuple[LogRule, ...] = ()
    """Patterns in the lines that rank 0 itself prints, by which a hang, a slow job or a fault is told: by AWS's
    operator on hyperpod-eks, by our agent elsewhere. `run.log` prints nothing: the script must print what a pattern is
    to find."""
    labels: dict[LabelKey, LabelValue] = {}
    """Labels of the job and its pods; tags, where the platform has those."""
    annotations: dict[LabelKey, str] = {}
    """Annotations of the job and its pods, on Kubernetes."""
    kubernetes: Kubernetes = Kubernetes()
    """What only Kubernetes has."""
    slurm: Slurm = Slurm()
    """What only Slurm has."""
    sagemaker: SageMaker = SageMaker()
    """What only SageMaker training jobs have."""
    overlay: Overlay = Overlay()
    """What this spec has no field for, in the target's own words; applied last."""
    chaos: Chaos | None = None
    """Faults to rehearse. On targets that cost money only with `on_clusters`."""

    @model_validator(mode="after")
    def _starts_something(self) -> JobConfig:
        if not self.script and not self.command:
            missing = InitErrorDetails(type="missing", loc=("script",), input={})
            raise ValidationError.from_exception_data("JobConfig", [missing])
        return self

    @property
    def words(self) -> list[str]:
        """What is started: script and arguments, or the command."""
        if self.command is None:
            return [self.script, *self.args]
        return ["/bin/sh", "-c", self.command] if isinstance(self.command, str) else list(self.command)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.workers_per_node

    @property
    def spares_in_all(self) -> int:
        """The job's own, or else those of its groups."""
        return self.spares or sum(group.spares for group in self.node_groups)
