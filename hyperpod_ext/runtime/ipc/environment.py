"""Names of the environment variables that processes in the container use, and functions that read them."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.errors import HyperpodExtError

ENV_SECRET_FILE = "HPX_SECRET_FILE"
ENV_RUN_DIR = "HPX_RUN_DIR"
ENV_AGENT_SOCKET = "HPX_AGENT_SOCKET"
ENV_MEMORY_SOCKET = "HPX_MEMORY_SOCKET"
ENV_CHAOS = "HPX_CHAOS"
ENV_SOCKET_DIR = "HPX_SOCKET_DIR"
ENV_FAILURE_DOMAIN = "HPX_FAILURE_DOMAIN"
"""Environment variable with the name of this node's failure domain, such as its rack or availability zone. If possible,
copies of snapshots are placed in other failure domains."""


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """The settings that an agent passes to a worker in environment variables."""

    rank: int
    world_size: int
    local_rank: int
    node: int
    agent_socket: str
    memory_socket: str
    secret: bytes
    config: RuntimeConfig

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> WorkerEnvironment | None:
        """Return the settings from `environ`; None if this process was not started by an agent of this project."""
        if ENV_AGENT_SOCKET not in environ:
            return None
        return cls(
            rank=int(environ["RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            local_rank=int(environ["LOCAL_RANK"]),
            node=int(environ["GROUP_RANK"]),
            agent_socket=environ[ENV_AGENT_SOCKET],
            memory_socket=environ[ENV_MEMORY_SOCKET],
            secret=read_secret(Path(environ[ENV_SECRET_FILE])),
            config=RuntimeConfig.model_validate_json(environ[ENV_RUNTIME]),
        )


_HINT_NOT_ROOT = "a container that does not run as root needs fsGroup in its pod's securityContext"


def read_secret(path: Path) -> bytes:
    """Return the job's secret from the file `path`. The file must not be readable by other users, because the secret
    gives access to the job.

    Raises:
        HyperpodExtError: the file is unreadable, is readable by other users, or is shorter than 16 bytes.
    """
    try:
        status = path.stat()
        secret = path.read_bytes().strip()
    except PermissionError as error:
        raise HyperpodExtError(f"cannot read the job's secret: {error}", hint=_HINT_NOT_ROOT) from error
    except OSError as error:
        raise HyperpodExtError(
            f"cannot read the job's secret: {error}", hint=f"Name another file with --secret-file or {ENV_SECRET_FILE}."
        ) from error
    mode = stat.S_IMODE(status.st_mode)
    # allow group access in a pod with an fsGroup, where mounted files belong to root and that group
    of_pod = status.st_uid == 0 and status.st_gid in {os.getegid(), *os.getgroups()} - {0}
    allowed = 0o740 if of_pod else 0o700
    if mode & ~allowed:
        raise HyperpodExtError(f"{path} is readable by other users (mode {mode:o})", hint=f"chmod 600 {path}")
    if len(secret) < 16:
        hint = "Use a secret of at least 16 bytes."
        raise HyperpodExtError(f"the secret in {path} is too short", hint=hint)
    return secret
