"""Target `kubeflow`: runs a job as a PyTorchJob (Kubeflow v1) or TrainJob (v2), on any Kubernetes with Kubeflow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import Problem
from hyperpod_ext.jobs.contract.capabilities import Capabilities
from hyperpod_ext.jobs.kubernetes.kinds import READS, kinds_of
from hyperpod_ext.jobs.kubernetes.shared_target import cancel as cancel
from hyperpod_ext.jobs.kubernetes.shared_target import logs as logs
from hyperpod_ext.jobs.kubernetes.shared_target import overlay_problems
from hyperpod_ext.jobs.kubernetes.shared_target import rehearse as rehearse
from hyperpod_ext.jobs.kubernetes.shared_target import result as result
from hyperpod_ext.jobs.kubernetes.shared_target import status as status
from hyperpod_ext.jobs.kubernetes.shared_target import submit as submit
from hyperpod_ext.jobs.kubernetes.shared_target import warnings as warnings
from hyperpod_ext.jobs.kubernetes.shared_target import watch as watch

if TYPE_CHECKING:
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.jobs.contract.job_status import JobStatus
    from hyperpod_ext.jobs.contract.targets import Target


PARTS = {
    "details": "hyperpod_ext.jobs.kubernetes.details",
    "leftovers": "hyperpod_ext.jobs.kubernetes.leftovers",
    "ports": "hyperpod_ext.jobs.kubernetes.details",
    "rehearsal": "hyperpod_ext.jobs.kubernetes.shared_target",
    "shell": "hyperpod_ext.jobs.kubernetes.details",
}
INSTEAD = {
    "move": "jobs on Kubeflow have no spares: drain the node, and the pod restarts on another node",
    "resize": "submit the job again with other `nodes`; the job continues from its newest durable checkpoint",
}


def capabilities() -> Capabilities:
    """Return the capabilities of target `kubeflow`."""
    return Capabilities(
        orchestrator="eks",
        pod_suffix="-worker-00000",
        image=True,
        elastic=True,
        process_restart=True,
        command=True,
        reads=READS | {"log_rules", "metrics", "network"},
    )


def render(job: JobConfig, cluster: ClusterConfig | None) -> dict[str, str]:
    """Return the files `network-policy.yaml` (unless the spec disables it) and `job.yaml`."""
    del cluster
    from hyperpod_ext.jobs.kubernetes.kubeflow_render import render_files

    return render_files(job)


def problems(job: JobConfig) -> Iterator[Problem]:
    """Yield the problems of the spec's overlay."""
    return overlay_problems("kubeflow", job, render)


def list_jobs() -> list[JobStatus]:
    """Return the status of all PyTorchJobs and TrainJobs in the namespace of the kubeconfig's current context."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return [found for kind in jobs.known_kinds(kinds_of("kubeflow")) for found in jobs.list_jobs(kind)]


if TYPE_CHECKING:
    import hyperpod_ext.jobs.kubernetes.kubeflow as this_module

    _checked: Target = this_module
