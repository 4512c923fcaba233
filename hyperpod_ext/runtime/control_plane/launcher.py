"""Finds the launcher of this process (our agent, `hyperpodrun` or `torchrun`) from its environment and ancestors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path

from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.runtime.ipc.environment import ENV_AGENT_SOCKET
from hyperpod_ext.runtime.prefork.place import ENV_LAUNCHER

ENV_HYPERPOD_SOCKET = "HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH"
ENV_HYPERPOD_MODE = "HPX_HYPERPODRUN_MODE"
"""Mode of `hyperpodrun`: `in-process` or `process`. A user must set HPX_HYPERPODRUN_MODE if workers cannot read
hyperpodrun's command line."""


class Launcher(Enum):
    AGENT = "our agent"
    HYPERPODRUN_IN_PROCESS = "hyperpodrun --inprocess-restart"
    HYPERPODRUN = "hyperpodrun"
    TORCHRUN = "torchrun"


def find_launcher(environ: Mapping[str, str] = os.environ) -> Launcher | None:
    """Return the launcher of this process; None if no launcher started it.

    Raises:
        ConfigError: HPX_HYPERPODRUN_MODE has an invalid value.
    """
    if ENV_AGENT_SOCKET in environ:
        return Launcher.AGENT
    if ENV_HYPERPOD_SOCKET in environ:
        return Launcher.HYPERPODRUN_IN_PROCESS if _restarts_in_process(environ) else Launcher.HYPERPODRUN
    if "TORCHELASTIC_RUN_ID" in environ and "MASTER_ADDR" in environ:
        return Launcher.TORCHRUN
    return None


def _restarts_in_process(environ: Mapping[str, str]) -> bool:
    """Return whether hyperpodrun restarts in process. Only hyperpodrun's command line shows its mode."""
    mode = environ.get(ENV_HYPERPOD_MODE)
    if mode is None:
        return any("inprocess" in flag.replace("-", "").replace("_", "") for flag in _flags_of_ancestors())
    if mode not in ("in-process", "process"):
        problem = f"{mode!r} is not a mode of hyperpodrun"
        raise ConfigError([Problem(problem, ENV_HYPERPOD_MODE, hint="valid: in-process, process")])
    return mode == "in-process"


def _flags_of_ancestors() -> Iterator[str]:
    launcher = os.environ.get(ENV_LAUNCHER, "")
    pid = int(launcher) if launcher.isdecimal() else os.getppid()
    while pid > 0:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return  # the ancestor has ended, or is outside of this container
        if any("hyperpod" in Path(part).name.lower() for part in command[:4]):
            yield from (part for part in command if part.startswith("--"))
            return  # skip the ancestors of hyperpodrun, which do not matter
        pid = int(status[1])
