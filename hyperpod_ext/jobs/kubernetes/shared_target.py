"""Functions that targets `hyperpod-eks` and `kubeflow` share. The Kubernetes client is imported only when it is
used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hyperpod_ext.config.job.overlay import KubernetesOverlay
from hyperpod_ext.jobs.kubernetes.kinds import kind_for

if TYPE_CHECKING:
    from hyperpod_ext.config.job.job import JobConfig
    from hyperpod_ext.errors import Problem
    from hyperpod_ext.jobs.contract.handle import JobHandle
    from hyperpod_ext.jobs.contract.job_status import JobStatus, StatusUpdate
    from hyperpod_ext.jobs.contract.plan_type import Plan


def warnings(job: JobConfig) -> Iterator[str]:
    """Yield nothing: jobs on Kubernetes need no warnings."""
    del job
    return iter(())


def overlay_problems(
    target: str, job: JobConfig, render: Callable[[JobConfig, None], Mapping[str, str]]
) -> Iterator[Problem]:
    """Yield problems of the overlay of `job`, and of the object that is rendered with the overlay.

    Args:
        render: renders the files of a job.
    """
    if job.overlay.kubernetes == KubernetesOverlay():
        return  # nothing to check: do not import the renderer, which is slow
    from hyperpod_ext.jobs.kubernetes.overlays import apply
    from hyperpod_ext.jobs.kubernetes.schemas import find_problems

    container = kind_for(target, job).container
    yield from apply.problems(job, container, lambda one: render(one, None), find_problems)


def submit(plan: Plan) -> JobHandle:
    """Create the objects of the plan on the server, and the job's Secret if it does not exist; return the handle."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.submit(kind_for(plan.target, plan.job), plan.job, plan.files)


def rehearse(plan: Plan) -> None:
    """Check the objects of the plan on the server without creating them."""
    from hyperpod_ext.jobs.kubernetes import jobs

    jobs.submit(kind_for(plan.target, plan.job), plan.job, plan.files, dry_run=True)


def status(handle: JobHandle) -> JobStatus:
    """Return the job's status, as its operator reports it."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.status(jobs.kind_of(handle), handle)


def watch(handle: JobHandle, with_lines: bool = False) -> Iterator[StatusUpdate]:
    """Yield an update every two seconds until the job has ended."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.watch(jobs.kind_of(handle), handle, with_lines)


def logs(handle: JobHandle, rank: int | None = None, follow: bool = False) -> Iterator[str]:
    """Yield the output of the job's pods, or of rank `rank`; with `follow`, until the job has ended."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.logs(jobs.kind_of(handle), handle, rank, follow)


def cancel(handle: JobHandle) -> JobStatus:
    """Delete the job, and wait until its pods have ended; return its status."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.cancel(jobs.kind_of(handle), handle)


def result(handle: JobHandle) -> Mapping[str, Any]:
    """Return the final status of an ended job, as its operator reports it."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.result(jobs.kind_of(handle), handle)
