"""A Plan: all that submit will do, decided without touching a network or a disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ext.config.job.job import JobConfig


@dataclass(frozen=True)
class Plan:
    """What will be sent, byte for byte, and what it will become."""

    target: str
    name: str
    job: JobConfig
    files: Mapping[str, str]
    """Name and whole text of each file that is sent."""
    world_size: int
    source_dir: Path
    """Folder of the spec; the script is relative to it."""
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """The plan as `--dry-run -o json` shows it."""
        return {
            "target": self.target,
            "name": self.name,
            "world_size": self.world_size,
            "nodes": self.job.nodes,
            "workers_per_node": self.job.workers_per_node,
            "warnings": list(self.warnings),
            "files": dict(self.files),
        }
