"""RuntimeConfig: what the container needs to know of the job, carried in the variable HPX_RUNTIME.

`launch` writes it and `runtime` reads it; this model is all that the two share. It is read leniently
(a newer launcher may say more than an older container understands) and written strictly.
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

if TYPE_CHECKING:  # no process of a running job needs all of it, and its models take a quarter of a second
    from hyperpod_ext.config.job.job import JobConfig

ENV_RUNTIME = "HPX_RUNTIME"
_LEFT_OUT = ("elastic", "log_rules", "metrics", "network", "process_group_backend")


class RuntimeConfig(Config):
    """The part of a JobConfig that is acted on inside the container."""

    model_config = ConfigDict(extra="ignore")

    name: DnsLabel
    """Name of the job; namespace of its snapshots."""
    nodes: PositiveInt
    """Machines the job runs on."""
    workers_per_node: PositiveInt
    """Processes on each machine."""
    spares: NonNegativeInt = 0
    """Machines beside them that wait for one to be lost."""
    elastic: Elastic | None = None
    """Numbers of nodes that it may go on with. Left out of the text where there is nothing to say."""
    global_batch_size: PositiveInt | None = None
    """Samples in one optimizer step over all ranks."""
    seed: NonNegativeInt = 0
    """Root of every rank's random numbers."""
    shared_memory_mib: PositiveInt | None = None
    """Size /dev/shm must have."""
    process_group_backend: Literal["gloo", "nccl"] | None = None
    """What process groups are opened with. Left out of the text where the workers find out."""
    network: Network | None = None
    """What state goes over. Left out of the text where nothing is said of it."""
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    """Where snapshots go."""
    restart: RestartPolicy = RestartPolicy()
    """What happens after a fault. `policy` and `samples` are left out of the text where healthy ranks wait."""
    chaos: Chaos | None = None
    """Faults to rehearse."""
    metrics: Metrics | None = None
    """Where the job's numbers are shown. Left out of the text where they are not."""

    log_rules: tuple[LogRule, ...] = ()
    """What our agent looks for in what rank 0 prints. Left out of the text where there is nothing, or AWS's operator
    tells it."""

    @model_serializer(mode="wrap")
    def _without_nothing(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped: dict[str, Any] = dump(self)
        for name in ("policy", "samples") if self.restart.policy == "wait" else ():
            dumped.get("restart", {}).pop(name, None)
        return {name: value for name, value in dumped.items() if value or name not in _LEFT_OUT}

    @classmethod
    def from_json(cls, text: str) -> RuntimeConfig:
        """What HPX_RUNTIME says.

        Raises:
            ConfigError: with every problem found.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            hint = "`hp-ext render` writes it"
            found = [(str(each["msg"]), ".".join(map(str, each["loc"]))) for each in error.errors()]
            raise ConfigError([Problem(what, path, ENV_RUNTIME, hint=hint) for what, path in found]) from None

    @property
    def interface(self) -> str:
        """Interface that nodes reach each other by; empty: that by which they reach the first one."""
        return (self.network.interface or "") if self.network is not None else ""

    @property
    def encrypted(self) -> bool:
        """Whether agents, and memory servers, speak TLS with each other."""
        return self.network is not None and self.network.tls

    @property
    def most_nodes(self) -> int:
        """Nodes that the job may come to have, spares not counted."""
        return max(self.nodes, self.elastic.max_nodes if self.elastic is not None else 0)

    @classmethod
    def of(cls, job: JobConfig) -> RuntimeConfig:
        """The runtime's share of `job`."""
        return cls(**{name: getattr(job, name) for name in cls.model_fields})

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.workers_per_node


def split_variable(name: str, text: str, longest: int) -> dict[str, str]:
    """`text` as one variable or, where an engine lets a variable have only `longest` characters, as several."""
    parts = [text[at : at + longest] for at in range(0, len(text), longest)]
    return {name: text} if len(parts) == 1 else {f"{name}_{index}": part for index, part in enumerate(parts)}


def take_variable(environment: MutableMapping[str, str], name: str) -> str | None:
    """What `split_variable` made variables of, taken out of `environment`; None where it is not set."""
    parts = [environment.pop(name)] if name in environment else []
    while (part := environment.pop(f"{name}_{len(parts)}", None)) is not None:
        parts.append(part)
    return "".join(parts) if parts else None
