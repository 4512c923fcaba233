"""Plan: the rendered files that `submit` will send. Making a plan needs neither network nor disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ext.config.job.job import JobConfig


@dataclass(frozen=True)
class Plan:
    """A job, and the exact files that `submit` will send to start it."""

    target: str
    name: str
    job: JobConfig
    files: Mapping[str, str]
    """Name and text of each file to send."""
    world_size: int
    source_dir: Path
    """Folder of the spec. A relative path of the script is relative to the spec's folder."""
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the plan for `--dry-run -o json`."""
        return {
            "target": self.target,
            "name": self.name,
            "world_size": self.world_size,
            "nodes": self.job.nodes,
            "workers_per_node": self.job.workers_per_node,
            "warnings": list(self.warnings),
            "files": dict(self.files),
        }
