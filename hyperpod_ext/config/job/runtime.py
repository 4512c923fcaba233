"""RuntimeConfig: the part of a job's spec that the container reads, from the environment variable HPX_RUNTIME.

The container ignores unknown fields in HPX_RUNTIME, because a newer launcher may send fields that an older container
does not know.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import (
    ConfigDict,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from hyperpod_ext.config.base import Config
from hyperpod_ext.config.budgets import LogRule
from hyperpod_ext.config.checkpoint import CheckpointPolicy
from hyperpod_ext.config.elastic import Elastic
from hyperpod_ext.config.fault_injection import Chaos
from hyperpod_ext.config.metrics import Metrics
from hyperpod_ext.config.names import DnsLabel
from hyperpod_ext.config.network import Network
from hyperpod_ext.config.restart import RestartPolicy
from hyperpod_ext.errors import ConfigError, Problem

if TYPE_CHECKING:  # a running job does not need the module job.py, whose models take a quarter of a second to build
    from hyperpod_ext.config.job.job import JobConfig

ENV_RUNTIME = "HPX_RUNTIME"
_LEFT_OUT = ("compat", "elastic", "log_rules", "metrics", "network", "process_group_backend")


class RuntimeConfig(Config):
    """The part of a JobConfig that the container uses."""

    model_config = ConfigDict(extra="ignore")

    name: DnsLabel
    """Name of the job. Snapshots of the job are stored under this name."""
    mode: str = "ours"
    """How the job recovers from faults, see JobConfig.mode. If the mode is `ours`, the field is left out of
    HPX_RUNTIME. The type is text and not a choice, because a newer launcher may have other modes."""
    compat: str | None = None
    """Packages of other projects that this project replaces, see JobConfig.compat. If unset, the field is left out of
    HPX_RUNTIME."""
    nodes: PositiveInt
    """Number of machines that the job runs on."""
    workers_per_node: PositiveInt
    """Number of worker processes on each machine."""
    spares: NonNegativeInt = 0
    """Number of additional machines that stay idle until a node is lost."""
    elastic: Elastic | None = None
    """Numbers of nodes that the job may run on while it trains. If unset, the field is left out of HPX_RUNTIME."""
    global_batch_size: PositiveInt | None = None
    """Number of samples in one optimizer step over all ranks."""
    seed: NonNegativeInt = 0
    """Seed of the random numbers of every rank."""
    shared_memory_mib: PositiveInt | None = None
    """Required size of /dev/shm in MiB. None: the size is not checked."""
    process_group_backend: Literal["gloo", "nccl"] | None = None
    """Backend of process groups. If the workers choose the backend, the field is left out of HPX_RUNTIME."""
    network: Network | None = None
    """Network between the nodes for snapshots and control messages. If unset, the field is left out of HPX_RUNTIME."""
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    """Tiers for snapshots, and the intervals between saves to each tier."""
    restart: RestartPolicy = RestartPolicy()
    """Recovery from faults inside the running job. With `policy: wait`, the fields `policy` and `samples` are left out
    of HPX_RUNTIME."""
    chaos: Chaos | None = None
    """Faults to inject, to test the recovery of the job."""
    metrics: Metrics | None = None
    """HTTP endpoint with metrics of the job. If unset, the field is left out of HPX_RUNTIME."""

    log_rules: tuple[LogRule, ...] = ()
    """Patterns that our agent looks for in the output of rank 0. The field is left out of HPX_RUNTIME if there are no
    patterns, or if AWS's operator sends the patterns to the agent."""

    @model_serializer(mode="wrap")
    def _without_nothing(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped: dict[str, Any] = dump(self)
        if self.mode == "ours":
            dumped.pop("mode", None)
        for name in ("policy", "samples") if self.restart.policy == "wait" else ():
            dumped.get("restart", {}).pop(name, None)
        return {name: value for name, value in dumped.items() if value or name not in _LEFT_OUT}

    @classmethod
    def from_json(cls, text: str) -> RuntimeConfig:
        """Parse the text of the environment variable HPX_RUNTIME.

        Raises:
            ConfigError: the text is invalid. The error lists all problems.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            hint = "`hp-ext render` writes it"
            found = [(str(each["msg"]), ".".join(map(str, each["loc"]))) for each in error.errors()]
            raise ConfigError([Problem(what, path, ENV_RUNTIME, hint=hint) for what, path in found]) from None

    @property
    def interface(self) -> str:
        """Name of the network interface between nodes. Empty: the interface over which a node reaches the first
        node."""
        return (self.network.interface or "") if self.network is not None else ""

    @property
    def encrypted(self) -> bool:
        """Whether agents and memory servers use TLS."""
        return self.network is not None and self.network.tls

    @property
    def most_nodes(self) -> int:
        """Maximum number of nodes of the job, without spares."""
        return max(self.nodes, self.elastic.max_nodes if self.elastic is not None else 0)

    @classmethod
    def of(cls, job: JobConfig) -> RuntimeConfig:
        """Return the part of the spec `job` that the container reads."""
        return cls(**{name: getattr(job, name) for name in cls.model_fields})

    @property
    def restarts_script(self) -> bool:
        """Whether every rank starts the script again after a fault, because the script saves and resumes by itself."""
        return self.mode == "run"

    @property
    def world_size(self) -> int:
        """Number of ranks in the job."""
        return self.nodes * self.workers_per_node


def split_variable(name: str, text: str, longest: int) -> dict[str, str]:
    """Split a long environment variable.

    Returns:
        The variable `name` with `text`; if `text` is longer than `longest`, variables `name_0`, `name_1` and so on.
    """
    parts = [text[at : at + longest] for at in range(0, len(text), longest)]
    return {name: text} if len(parts) == 1 else {f"{name}_{index}": part for index, part in enumerate(parts)}


def take_variable(environment: MutableMapping[str, str], name: str) -> str | None:
    """Remove the variable `name` from `environment`, or the parts into which `split_variable` has split it, and return
    the text. None if `environment` has neither the variable nor its parts."""
    parts = [environment.pop(name)] if name in environment else []
    while (part := environment.pop(f"{name}_{len(parts)}", None)) is not None:
        parts.append(part)
    return "".join(parts) if parts else None
