"""Name, checkpoint policy and secret of a job without our agent, with a default for each."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.runtime.ipc.environment import ENV_SECRET_FILE, read_secret
from hyperpod_ext.runtime.membership.parity_groups import without_agent
from hyperpod_ext.runtime.memory_server.client.start import secret_file_of

ENV_PORT_BASE = "HPX_PORT_BASE"
_PORT_BASE = 29600


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one job, equal on every rank."""

    config: RuntimeConfig
    named: bool
    """Whether the user has named the job. An unnamed job cannot be continued after its launcher has ended."""
    secret_file: Path
    secret: bytes

    @classmethod
    def of(cls, nodes: int, workers_per_node: int, environ: Mapping[str, str], suffix: str = "") -> Settings:
        """Return the settings from the variables HPX_RUNTIME and HPX_SECRET_FILE.

        Without HPX_RUNTIME, use defaults: the job's name is made from the script's name and `suffix`.

        Raises:
            HyperpodExtError: the secret is unreadable, or other users can read it.
        """
        text = environ.get(ENV_RUNTIME)
        if text is None:
            name = name_of(sys.argv[0], suffix)
            config = RuntimeConfig(name=name, nodes=nodes, workers_per_node=workers_per_node)
        else:
            config = sized(RuntimeConfig.from_json(text), nodes, workers_per_node)
        given = environ.get(ENV_SECRET_FILE)
        secret_file = (
            Path(given) if given else secret_file_of(config.name, environ, durable=bool(config.checkpoint.durable()))
        )
        return cls(config, text is not None, secret_file, read_secret(secret_file))


def sized(config: RuntimeConfig, nodes: int, workers_per_node: int) -> RuntimeConfig:
    """Return the configuration with the launcher's numbers of nodes and workers per node.

    Raises:
        ConfigError: the global batch is not divisible by the number of ranks, or the checkpoint policy uses parity,
            which needs our agent.
    """
    world_size = nodes * workers_per_node
    if (problem_of_parity := without_agent(config.checkpoint)) is not None:
        raise ConfigError([problem_of_parity])
    if config.global_batch_size is not None and config.global_batch_size % world_size:
        problem = f"{config.global_batch_size} samples cannot be divided evenly among {world_size} ranks"
        raise ConfigError([Problem(problem, "global_batch_size", hint="write a multiple of the number of ranks")])
    return config.model_copy(update={"nodes": nodes, "workers_per_node": workers_per_node})


def name_of(script: str, suffix: str = "") -> str:
    """Return a valid job name made from the script's name and `suffix`."""
    stem = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-") or "job"
    return f"{stem[:40].strip('-')}-{suffix}" if suffix else stem[:40].strip("-")


def port_base(environ: Mapping[str, str] = os.environ) -> int:
    """Return the port of a node's first rank. The node's other ranks use the following ports.

    Raises:
        ConfigError: HPX_PORT_BASE is not a valid port.
    """
    base = environ.get(ENV_PORT_BASE, str(_PORT_BASE))
    if not base.isdecimal() or not 1024 <= int(base) <= 65000:
        raise ConfigError([Problem(f"{base!r} is not a port", ENV_PORT_BASE, hint="write a number from 1024 to 65000")])
    return int(base)
