"""Targets: places that run jobs. Each is one module with the functions of `Target`, loaded on use."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from hyperpod_ext.errors import ConfigError, Problem

if TYPE_CHECKING:
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.config.job.job import JobConfig
    from hyperpod_ext.submit.contract.capabilities import Capabilities
    from hyperpod_ext.submit.contract.handle import JobHandle
    from hyperpod_ext.submit.contract.job_status import JobStatus, StatusUpdate
    from hyperpod_ext.submit.contract.plan_type import Plan

TARGETS: dict[str, str] = {
    "local": "hyperpod_ext.submit.local.target",
    "hyperpod-eks": "hyperpod_ext.submit.kubernetes.hyperpod_eks",
    "kubeflow": "hyperpod_ext.submit.kubernetes.kubeflow",
    "hyperpod-slurm": "hyperpod_ext.submit.slurm.target",
    "sagemaker": "hyperpod_ext.submit.sagemaker.target",
}
"""Name of each target and the module that is it."""


class Target(Protocol):
    """What a target module can do. Modules, not classes: none of them has state."""

    def capabilities(self) -> Capabilities:
        """Its row of the table."""

    def problems(self, job: JobConfig) -> Iterator[Problem]:
        """Why this target cannot run `job`, besides what its capabilities say."""

    def warnings(self, job: JobConfig) -> Iterator[str]:
        """What will be otherwise than one may think."""

    def render(self, job: JobConfig, cluster: ClusterConfig | None) -> dict[str, str]:
        """The files that submit would send. Pure; depends on nothing of this machine."""

    def submit(self, plan: Plan) -> JobHandle:
        """Start the job from the files of `plan`, unchanged."""

    def list_jobs(self) -> list[JobStatus]:
        """Every job it knows of, by name."""

    def status(self, handle: JobHandle) -> JobStatus:
        """What is known of one job."""

    def watch(self, handle: JobHandle, with_lines: bool = False) -> Iterator[StatusUpdate]:
        """A moment every fraction of a second, until the job has ended."""

    def logs(self, handle: JobHandle, rank: int | None = None, follow: bool = False) -> Iterator[str]:
        """What the workers printed."""

    def cancel(self, handle: JobHandle) -> JobStatus:
        """End the job, and return when nothing of it is left."""

    def result(self, handle: JobHandle) -> Mapping[str, Any]:
        """What an ended job found out."""


def get_target(name: str) -> Target:
    """The module of a target.

    Raises:
        ConfigError: there is no such target.
    """
    from hyperpod_ext.config.files.nearest import suggest

    if name in TARGETS:
        return cast(Target, importlib.import_module(TARGETS[name]))
    raise ConfigError([Problem(f"there is no target `{name}`", hint=suggest(name, TARGETS))])
