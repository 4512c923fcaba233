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
    """What the operators and the runtime under them can do."""
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
    """`network-policy.yaml` and `job.yaml`."""
    del cluster  # nothing depends on it
    from hyperpod_ext.jobs.kubernetes.kubeflow_render import render_files

    return render_files(job)


def problems(job: JobConfig) -> Iterator[Problem]:
    """What is wrong with the overlay of the spec."""
    if job.overlay.kubernetes == KubernetesOverlay():
        return iter(())  # what renders need not be loaded
    from hyperpod_ext.jobs.kubernetes.kubeflow_render import PYTORCH_CONTAINER, TRAIN_CONTAINER, render_files
    from hyperpod_ext.jobs.kubernetes.overlays import apply
    from hyperpod_ext.jobs.kubernetes.schemas import find_problems

    name = TRAIN_CONTAINER if job.kubernetes.kubeflow_api == "trainjob" else PYTORCH_CONTAINER
    return apply.problems(job, name, render_files, find_problems)


def warnings(job: JobConfig) -> Iterator[str]:
    """Nothing: what renders says it all."""
    del job
    return iter(())


def submit(plan: Plan) -> JobHandle:
    """Create the objects of the plan, and the job's secret if there is none."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.submit(_kind_of(plan.job), plan.job, plan.files)


def rehearse(plan: Plan) -> None:
    """Have the server check the objects of the plan; nothing is kept."""
    from hyperpod_ext.jobs.kubernetes import jobs

    jobs.submit(_kind_of(plan.job), plan.job, plan.files, dry_run=True)


def list_jobs() -> list[JobStatus]:
    """The jobs of both kinds in the namespace of the current context."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return [found for kind in jobs.known_kinds(kinds_of("kubeflow")) for found in jobs.list_jobs(kind)]


def status(handle: JobHandle) -> JobStatus:
    """As the operator sees it."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.status(_kind_at(handle), handle)


def watch(handle: JobHandle, with_lines: bool = False) -> Iterator[StatusUpdate]:
    """A moment every two seconds."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.watch(_kind_at(handle), handle, with_lines)


def logs(handle: JobHandle, rank: int | None = None, follow: bool = False) -> Iterator[str]:
    """What the pods print."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.logs(_kind_at(handle), handle, rank, follow)


def cancel(handle: JobHandle) -> JobStatus:
    """Delete the job."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.cancel(_kind_at(handle), handle)


def result(handle: JobHandle) -> Mapping[str, Any]:
    """What the operator says of a job that has ended."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.result(_kind_at(handle), handle)


def _kind_of(job: JobConfig) -> Kind:
    return TRAIN if job.kubernetes.kubeflow_api == "trainjob" else PYTORCH


def _kind_at(handle: JobHandle) -> Kind:
    """Which of the two kinds has a job of this name."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.kind_of(kinds_of("kubeflow"), handle)


if TYPE_CHECKING:
    import hyperpod_ext.jobs.kubernetes.kubeflow as this_module

    _checked: Target = this_module
