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
    listen: tuple[str, int] | None = None
    """Where others reach this agent, as somebody outside of the job has told all; it also says which nodes are gone."""
    others: tuple[tuple[str, int], ...] = ()
    """Where agents of a job that runs listen, one of which coordinates; none: where node 0 is."""
    keep_events: bool = False
    """Nobody else sees the run directory: the job's events go to its first durable tier, too."""
