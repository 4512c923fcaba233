"""A Plan: all that submit will do, decided without touching a network or a disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ext.config.cluster import ClusterConfig
from hyperpod_ext.config.job import JobConfig
from hyperpod_ext.errors import Problem, UnsupportedError
from hyperpod_ext.launch.capabilities import unsupported, unused
from hyperpod_ext.launch.targets import get_target


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


def make_plan(
    job: JobConfig,
    cluster: ClusterConfig | None = None,
    target: str = "local",
    source_dir: Path = Path(),
) -> Plan:
    """Check what only job, cluster and target together show, then render.

    Raises:
        UnsupportedError: holds every reason why this target cannot run this job.
        ConfigError: there is no such target.
    """
    if problems := find_problems(job, cluster, target):
        raise UnsupportedError(problems)
    module = get_target(target)
    return Plan(
        target=target,
        name=job.name,
        job=job,
        files=module.render(job, cluster),
        world_size=job.world_size,
        source_dir=source_dir,
        warnings=tuple(unused(job, target, module.capabilities())),
    )


def find_problems(job: JobConfig, cluster: ClusterConfig | None, target: str | None) -> list[Problem]:
    """What only job, cluster and target together show to be wrong."""
    problems: list[Problem] = []
    if target is not None:
        problems += unsupported(job, target, get_target(target).capabilities())
    if cluster is not None:
        problems += _cluster_problems(job, cluster)
    return problems


def _cluster_problems(job: JobConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    if job.nodes > cluster.working_nodes:
        yield Problem(
            f"the job wants {job.nodes} nodes; cluster {cluster.name} has {cluster.working_nodes} besides its spares",
            path="nodes",
            hint=f"write at most {cluster.working_nodes}, or give the cluster more machines",
        )
