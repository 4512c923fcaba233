"""JobConfig: the spec of a training job, for any target."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
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


Command = Annotated[str | tuple[str, ...], BeforeValidator(_command, json_schema_input_type=str | list[str])]


class Rendezvous(Config):
    """How the nodes of a job find each other."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port on the first node, to which all nodes connect. 0: any free port, on targets that can choose one."""


class Parallelism(Config):
    """Numbers of ranks among which one copy of the model is divided. The copies of the model are data parallel."""

    tensor: PositiveInt = 1
    """Number of ranks that share each layer (tensor parallelism)."""
    pipeline: PositiveInt = 1
    """Number of pipeline stages into which the layers are divided."""
    context: PositiveInt = 1
    """Number of ranks that share each sequence (context parallelism)."""

    @property
    def ranks_per_copy(self) -> int:
        """Number of ranks that together hold one copy of the model."""
        return self.tensor * self.pipeline * self.context


class JobConfig(Config):
    """One training job: its script, its machines, and its recovery from faults."""

    name: Annotated[DnsLabel, Field(examples=["tiny-gpt"])]
    """Name of the job: lower-case letters, digits and dashes, at most 63 characters."""
    script: Annotated[str, Field(examples=["train.py"])] = ""
    """Python file that trains. The path is relative to the folder of the spec file."""
    command: Annotated[Command, Field(examples=[["./train.sh"]])] | None = None
    """Command to run instead of a script: a list of words, or a text for the shell. The launcher starts the command
    once for each worker, with the environment variables of the worker's rank. A command needs `mode: plain`, because
    its processes do not use this project's runtime."""
    args: tuple[str, ...] = ()
    """Arguments of the script. Write numbers in quotes, because arguments are text."""
    env: dict[EnvName, str] = {}
    """Environment variables of every worker. Do not put secrets into `env`, because the spec is stored and shown. Names
    that start with HPX_ are reserved for the launcher, except HPX_PORT_BASE, HPX_SOCKET_DIR, HPX_HYPERPODRUN_MODE and
    HPX_TERMINATION_LOG."""
    cluster: Annotated[str, Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}$", examples=["research"])] | None = None
    """Name of a cluster that `hp-ext cluster deploy` created. Outputs of the cluster fill in unset fields of the job:
    URIs of S3 tiers, and, on targets that need them, namespace, service account, queue, role, output, region, subnets
    and security groups."""
    image: Annotated[str, Field(min_length=1, examples=["1.dkr.ecr.us-west-2.amazonaws.com/train:1"])] | None = None
    """Container image, on targets that run containers. The script must be in the image or on a volume."""
    working_dir: AbsolutePath | None = None
    """Folder inside the container that the path `script` is relative to. With `working_dir`, `hp-ext validate` does not
    check whether the script exists. Default: the working folder of the image, which must have the files of the spec's
    folder."""
    mode: Literal["ours", "plain", "run", "aws-checkpointless", "aws-managed-tier"] = "ours"
    """How the job recovers from faults. `ours`: this project's runtime recovers steps. `run`: this project's agent
    restarts a script that saves and resumes by itself. `plain`: a launcher starts the processes, and this project does
    not recover them. `aws-checkpointless`: AWS's checkpointless container. `aws-managed-tier`: the script uses AWS's
    managed tiered checkpointing. The two modes of AWS need HyperPod on EKS."""
    compat: Literal["aws"] | None = None
    """Packages of other projects that this project replaces with its own implementation, so that the script can import
    them unchanged. `aws`: hyperpod_checkpointless_training and hyperpod_elastic_agent, for scripts written for AWS's
    checkpointless and elastic training. A job with `compat` needs mode `ours` or `run`, and our agent."""
    nodes: Annotated[PositiveInt, Field(le=100_000)] = 1
    """Number of machines that the job runs on; at most 100,000, the largest size of an EKS cluster."""
    workers_per_node: Annotated[PositiveInt, Field(le=4096)] = 1
    """Number of worker processes on each machine, one per GPU; at most 4,096. The world size is nodes x
    workers_per_node."""
    spares: NonNegativeInt = 0
    """Number of additional machines that stay idle until they replace a lost node. A job survives the loss of its first
    node only if `nodes` plus `spares` is at least three, because the majority of the machines must remain to elect
    another coordinator."""
    parallelism: Parallelism = Parallelism()
    """How the script divides its model among ranks. Checks of the spec read `parallelism`; the running job does not."""
    global_batch_size: PositiveInt | None = None
    """Number of samples in one optimizer step over all ranks. The samples must divide evenly among the ranks."""
    seed: NonNegativeInt = 0
    """Seed of random numbers. The random numbers of step s on rank r depend only on (seed, s, r), so that the
    repetition of a step after a fault computes the same result."""
    shared_memory_mib: PositiveInt | None = None
    """Size of /dev/shm on each node in MiB, for data loaders and NCCL. Targets that run containers mount /dev/shm with
    this size, and every node checks the size before the workers start."""
    process_group_backend: Literal["gloo", "nccl"] | None = None
    """Backend for collectives of GPU tensors. Collectives of CPU tensors always use gloo. Default: NCCL if a worker
    sees a GPU, otherwise gloo."""
    resources: Resources = Resources()
    """Resources of each node."""
    libraries: Libraries = Libraries()
    """Versions of EFA libraries in the image, which determine the environment variables that the job gets for EFA."""
    scheduling: Scheduling = Scheduling()
    """Queue, priority and placement of the job's nodes."""
    node_groups: tuple[NodeGroup, ...] = ()
    """Groups of nodes that differ in instance type or priority. Default: all nodes are equal."""
    volumes: tuple[Volume, ...] = ()
    """Volumes that are mounted into the job's containers."""
    elastic: Elastic | None = None
    """Numbers of nodes that the job may run on while it trains. Default: the job always runs on `nodes` nodes."""
    rendezvous: Rendezvous = Rendezvous()
    """How the nodes of the job find each other."""
    network: Network | None = None
    """Network between the nodes for snapshots and control messages, and its encryption. Default: the network over which
    a node reaches the first node, without encryption."""
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    """Tiers for snapshots, and the intervals between saves to each tier."""
    restart: RestartPolicy = RestartPolicy()
    """Recovery from faults inside the running job."""
    relaunch: Relaunch = Relaunch()
    """Restarts of the whole job by the platform."""
    timeouts: Timeouts = Timeouts()
    """Time limits of the whole job."""
    metrics: Metrics | None = None
    """HTTP endpoint with metrics of the running job for Prometheus. Default: no endpoint."""
    log_rules: tuple[LogRule, ...] = ()
    """Patterns for the output of rank 0 that detect a hang, a slow job or a fault. AWS's operator applies the patterns
    on target hyperpod-eks; our agent applies them on other targets. The script must print the lines itself, because
    `run.log` prints nothing."""
    labels: dict[LabelKey, LabelValue] = {}
    """Kubernetes labels of the job and its pods. On platforms with tags instead of labels, the labels become tags."""
    annotations: dict[LabelKey, str] = {}
    """Kubernetes annotations of the job and its pods."""
    kubernetes: Kubernetes = Kubernetes()
    """Settings of Kubernetes."""
    slurm: Slurm = Slurm()
    """Settings of Slurm."""
    sagemaker: SageMaker = SageMaker()
    """Settings of SageMaker training jobs."""
    overlay: Overlay = Overlay()
    """Settings of the target for which the spec has no field, in the target's own format. The overlay is applied to the
    rendered files last."""
    chaos: Chaos | None = None
    """Faults to inject, to test the recovery of the job. Targets that cost money inject faults only with
    `on_clusters`."""

    @model_validator(mode="after")
    def _starts_something(self) -> JobConfig:
        if not self.script and not self.command:
            missing = InitErrorDetails(type="missing", loc=("script",), input={})
            raise ValidationError.from_exception_data("JobConfig", [missing])
        return self

    @property
    def words(self) -> list[str]:
        """Words of the command line: the script with its arguments, or the command. A text for the shell runs with
        `/bin/sh -c`."""
        if self.command is None:
            return [self.script, *self.args]
        return ["/bin/sh", "-c", self.command] if isinstance(self.command, str) else list(self.command)

    @property
    def restarts_script(self) -> bool:
        """Whether every rank starts the script again after a fault. True in mode `run`."""
        return self.mode == "run"

    @property
    def has_agent(self) -> bool:
        """Whether this project's agent starts the workers. True in the modes `ours` and `run`."""
        return self.mode in ("ours", "run")

    @property
    def world_size(self) -> int:
        """Number of ranks in the job."""
        return self.nodes * self.workers_per_node

    @property
    def spares_in_all(self) -> int:
        """Number of spare nodes of the job: `spares`, or the sum over all node groups."""
        return self.spares or sum(group.spares for group in self.node_groups)
