"""JobConfig: one training job, as its author asks for it. It knows no target."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.chaos import Chaos
from hyperpod_ext.config.checkpoint import CheckpointPolicy

JobName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
EnvName = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="letters, digits and underscores, not starting with a digit",
    ),
]


class RestartPolicy(Config):
    """What happens after a fault, and how often."""

    max_restarts: NonNegativeInt = 10
    """Faults the job recovers from before it gives up. 0: the first fault ends it."""
    leave_timeout_s: PositiveFloat = 30.0
    """Seconds a worker has, after a fault elsewhere, to leave the step it is making. One that hangs longer
    is ended and replaced as if it had died."""
    preload: tuple[str, ...] = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo")
    """Modules each node imports once, ahead of need: a replacement worker is forked from there and
    skips its imports, which are most of a restart. They must not start threads or touch a GPU."""


class Rendezvous(Config):
    """Where the nodes meet."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port on the first node. 0: any free one, where the target can choose."""


class JobConfig(Config):
    """One training job: what runs, on how many machines, and what happens when one fails."""

    name: Annotated[JobName, Field(examples=["tiny-gpt"])]
    """Name of the job: lower-case letters, digits and dashes, at most 63 characters."""
    script: Annotated[str, Field(min_length=1, examples=["train.py"])]
    """Python file that trains, relative to this file."""
    args: tuple[str, ...] = ()
    """Arguments of the script. Quote numbers: they reach the script as text."""
    env: dict[EnvName, str] = {}
    """Environment of every worker. No secrets: the spec is stored and shown."""
    image: str | None = None
    """Container image, on targets that run containers."""
    nodes: PositiveInt = 1
    """Machines the job runs on."""
    workers_per_node: PositiveInt = 1
    """Processes on each machine, one a GPU. World size is nodes x workers_per_node."""
    global_batch_size: PositiveInt | None = None
    """Samples in one optimizer step over all ranks; must divide evenly among them."""
    seed: NonNegativeInt = 0
    """Random numbers of step s on rank r follow from (seed, s, r) alone, so that a recovered step
    repeats exactly."""
    shared_memory_mib: PositiveInt | None = None
    """Size /dev/shm must have on each node, in MiB, for data loaders and NCCL. Container targets
    mount it; every node checks it before the workers start."""
    rendezvous: Rendezvous = Rendezvous()
    """Where the nodes meet."""
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    """Where snapshots go, and how often."""
    restart: RestartPolicy = RestartPolicy()
    """What happens after a fault."""
    chaos: Chaos | None = None
    """Faults to rehearse. Only for targets that cost nothing."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.workers_per_node
