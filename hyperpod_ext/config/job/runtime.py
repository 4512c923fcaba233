"""RuntimeConfig: the container's part of the job, in the variable HPX_RUNTIME.

The variable is written strictly and read leniently, because a newer launcher may send fields that an older container
lacks.
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

if TYPE_CHECKING:  # a running job does not need this module, and its models take a quarter of a second
    from hyperpod_ext.config.job.job import JobConfig

ENV_RUNTIME = "HPX_RUNTIME"
_LEFT_OUT = ("compat", "elastic", "log_rules", "metrics", "network", "process_group_backend")


class RuntimeConfig(Config):
    """The part of a JobConfig that the container uses."""

    model_config = ConfigDict(extra="ignore")

    name: DnsLabel
    """Name of the job; namespace of its snapshots."""
    mode: str = "ours"
    """Recovery of the job. Omitted if `ours`; text, because a newer launcher may have others."""
    compat: str | None = None
    """Packages of others that the script may import although this project replaces them. Omitted if unset."""
    nodes: PositiveInt
    """Machines the job runs on."""
    workers_per_node: PositiveInt
    """Processes on each machine."""
    spares: NonNegativeInt = 0
    """Additional machines that stay idle until a node is lost."""
    elastic: Elastic | None = None
    """Numbers of nodes that the job may run on. Omitted if unset."""
    global_batch_size: PositiveInt | None = None
    """Samples in one optimizer step over all ranks."""
    seed: NonNegativeInt = 0
    """Seed of every rank's random numbers."""
    shared_memory_mib: PositiveInt | None = None
    """Required size of /dev/shm."""
    process_group_backend: Literal["gloo", "nccl"] | None = None
    """Backend of process groups. Omitted if the workers choose it."""
    network: Network | None = None
    """Network for state. Omitted if unset."""
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    """Tiers for snapshots."""
    restart: RestartPolicy = RestartPolicy()
    """Recovery from faults. `policy` and `samples` are omitted if healthy ranks wait."""
    chaos: Chaos | None = None
    """Faults to inject."""
    metrics: Metrics | None = None
    """Metrics of the job. Omitted if unset."""

    log_rules: tuple[LogRule, ...] = ()
    """Patterns that our agent looks for in rank 0's output. Omitted if empty, or if AWS's operator sends them."""

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
        """Parse HPX_RUNTIME.

        Raises:
            ConfigError: the text is invalid; the error has all problems.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            hint = "`hp-ext render` writes it"
            found = [(str(each["msg"]), ".".join(map(str, each["loc"]))) for each in error.errors()]
            raise ConfigError([Problem(what, path, ENV_RUNTIME, hint=hint) for what, path in found]) from None

    @property
    def interface(self) -> str:
        """Interface between nodes. Empty: the interface over which a node reaches the first node."""
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
        """Return the runtime's part of `job`."""
        return cls(**{name: getattr(job, name) for name in cls.model_fields})

    @property
    def restarts_script(self) -> bool:
        """Whether a fault starts the script again on every rank: it saves and resumes by itself."""
        return self.mode == "run"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.workers_per_node


def split_variable(name: str, text: str, longest: int) -> dict[str, str]:
    """Return `text` as one variable, or as several of at most `longest` characters."""
    parts = [text[at : at + longest] for at in range(0, len(text), longest)]
    return {name: text} if len(parts) == 1 else {f"{name}_{index}": part for index, part in enumerate(parts)}


def take_variable(environment: MutableMapping[str, str], name: str) -> str | None:
    """Remove the variables of `split_variable` from `environment`, and return their text; None if unset."""
    parts = [environment.pop(name)] if name in environment else []
    while (part := environment.pop(f"{name}_{len(parts)}", None)) is not None:
        parts.append(part)
    return "".join(parts) if parts else None
