"""Target `kubeflow`: a PyTorchJob (v1) or a TrainJob (v2), for any Kubernetes with Kubeflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.overlay import KubernetesOverlay
from hyperpod_ext.errors import Problem
from hyperpod_ext.jobs.contract.capabilities import Capabilities
from hyperpod_ext.jobs.contract.handle import JobHandle
from hyperpod_ext.jobs.contract.job_status import JobStatus, StatusUpdate
from hyperpod_ext.jobs.kubernetes.kinds import PYTORCH, READS, TRAIN, Kind, kinds_of

if TYPE_CHECKING:
    from hyperpod_ext.config.clusters.cluster import ClusterConfig
    from hyperpod_ext.jobs.contract.plan_type import Plan
    from hyperpod_ext.jobs.contract.targets import Target


PARTS = {
    "details": "hyperpod_ext.jobs.kubernetes.details",
    "leftovers": "hyperpod_ext.jobs.kubernetes.leftovers",
    "ports": "hyperpod_ext.jobs.kubernetes.inside",
    "rehearsal": "hyperpod_ext.jobs.kubernetes.kubeflow",
    "shell": "hyperpod_ext.jobs.kubernetes.inside",
}
INSTEAD = {
    "faults": "write `chaos.inject` with `on_clusters: true` in the spec, or rehearse with --target local",
    "move": "its jobs have no spares: drain the node, and the pod comes back on another one",
    "resize": "submit it again with other `nodes`; it goes on from its newest durable checkpoint",
}


def capabilities() -> Capabilities:
    """Return the capabilities of the operators and the runtime under them."""
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
    """Render `network-policy.yaml` and `job.yaml`."""
    del cluster  # not needed
    from hyperpod_ext.jobs.kubernetes.kubeflow_render import render_files

    return render_files(job)


def problems(job: JobConfig) -> Iterator[Problem]:
    """Return problems of the overlay."""
    if job.overlay.kubernetes == KubernetesOverlay():
        return iter(())  # do not load the renderer
    from hyperpod_ext.jobs.kubernetes.kubeflow_render import PYTORCH_CONTAINER, TRAIN_CONTAINER, render_files
    from hyperpod_ext.jobs.kubernetes.overlays import apply
    from hyperpod_ext.jobs.kubernetes.schemas import find_problems

    name = TRAIN_CONTAINER if job.kubernetes.kubeflow_api == "trainjob" else PYTORCH_CONTAINER
    return apply.problems(job, name, render_files, find_problems)


def warnings(job: JobConfig) -> Iterator[str]:
    """Yield nothing."""
    del job
    return iter(())


def submit(plan: Plan) -> JobHandle:
    """Create the objects of the plan, and the job's secret if it is missing."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.submit(_kind_of(plan.job), plan.job, plan.files)


def rehearse(plan: Plan) -> None:
    """Check the objects of the plan on the server without creating them."""
    from hyperpod_ext.jobs.kubernetes import jobs

    jobs.submit(_kind_of(plan.job), plan.job, plan.files, dry_run=True)


def list_jobs() -> list[JobStatus]:
    """Return the jobs of both kinds in the namespace of the current context."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return [found for kind in jobs.known_kinds(kinds_of("kubeflow")) for found in jobs.list_jobs(kind)]


def status(handle: JobHandle) -> JobStatus:
    """Return the status that the operator reports."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.status(_kind_at(handle), handle)


def watch(handle: JobHandle, with_lines: bool = False) -> Iterator[StatusUpdate]:
    """Yield an update every two seconds."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.watch(_kind_at(handle), handle, with_lines)


def logs(handle: JobHandle, rank: int | None = None, follow: bool = False) -> Iterator[str]:
    """Yield the output of the pods."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.logs(_kind_at(handle), handle, rank, follow)


def cancel(handle: JobHandle) -> JobStatus:
    """Delete the job."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.cancel(_kind_at(handle), handle)


def result(handle: JobHandle) -> Mapping[str, Any]:
    """Return the operator's status of an ended job."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.result(_kind_at(handle), handle)


def _kind_of(job: JobConfig) -> Kind:
    return TRAIN if job.kubernetes.kubeflow_api == "trainjob" else PYTORCH


def _kind_at(handle: JobHandle) -> Kind:
    """Return the kind of the existing job."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.kind_of(kinds_of("kubeflow"), handle)


if TYPE_CHECKING:
    import hyperpod_ext.jobs.kubernetes.kubeflow as this_module

    _checked: Target = this_module
