"""What one agent was started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hyperpod_ext.config.job.runtime import RuntimeConfig


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What one agent was started with."""

    config: RuntimeConfig
    node: int
    host: str
    port: int
    argv: list[str]
    """Script and its arguments."""
    run_dir: Path
    socket_dir: Path
    secret_file: Path
    secret: bytes
    chaos: bool = True
    join_timeout_s: float = 600.0
    rejoin: bool = False
    """The job runs already; this agent takes the place of one that was lost."""
