"""Target `hyperpod-eks`: runs a job as a HyperPodPyTorchJob, under the HyperPod training operator on Amazon EKS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hyperpod_ext.catalog import labels
from hyperpod_ext.config.checkpoint import PeerTier
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import Problem
from hyperpod_ext.jobs.contract.capabilities import Capabilities
from hyperpod_ext.jobs.contract.rank_variables import NODES_OF_OPERATOR
from hyperpod_ext.jobs.kubernetes.kinds import HYPERPOD, READS
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
    "faults": "hyperpod_ext.jobs.fault_injection.pods",
    "leftovers": "hyperpod_ext.jobs.kubernetes.leftovers",
    "ports": "hyperpod_ext.jobs.kubernetes.details",
    "rehearsal": "hyperpod_ext.jobs.kubernetes.shared_target",
    "resize": "hyperpod_ext.jobs.kubernetes.hyperpod_eks_resize",
    "shell": "hyperpod_ext.jobs.kubernetes.details",
}
INSTEAD = {
    "move": "the operator assigns ranks to pods and cannot exchange them: drain the node with `hp-ext node drain`, "
    "and a spare takes over as after a fault",
}


def capabilities() -> Capabilities:
    """Return the capabilities of target `hyperpod-eks`."""
    return Capabilities(
        orchestrator="eks",
        pod_suffix="-nodes-00000",
        image=True,
        elastic=True,
        spares=True,
        process_restart=True,
        aws_checkpointless=True,
        managed_tier=True,
        command=True,
        reads=READS | {"log_rules", "metrics"},
    )


def render(job: JobConfig, cluster: ClusterConfig | None) -> dict[str, str]:
    """Return the files `network-policy.yaml` (unless the spec disables it) and `job.yaml`."""
    from hyperpod_ext.jobs.kubernetes.hyperpod_eks_render import render_files

    return render_files(job, cluster)


def problems(job: JobConfig) -> Iterator[Problem]:
    """Yield a problem for each field that the launcher does not support, or that conflicts with the operator, and for
    each wrong field of the overlay."""
    yield from _of_launcher(job)
    yield from _of_ports(job)
    yield from _of_variables(job)
    yield from overlay_problems(HYPERPOD.target, job, render)


def _of_launcher(job: JobConfig) -> Iterator[Problem]:
    """Yield a problem for each setting that the launcher in `kubernetes.launcher` does not support."""
    if job.kubernetes.launcher != "ours":
        if job.kubernetes.operator_addresses:
            yield Problem(
                "has no effect under hyperpodrun, which accepts commands from every address",
                path="kubernetes.operator_addresses",
                hint="remove this field, or write `kubernetes.launcher: ours`",
            )
        # modes without this project's agent do not support `chaos`, which `unsupported` reports
        if job.chaos is not None and job.chaos.faults and job.has_agent:
            yield Problem(
                "has no effect under hyperpodrun, which cannot kill ranks on request",
                path="chaos.faults",
                hint="use chaos.inject with kind sigkill, or write `kubernetes.launcher: ours`",
            )
        if job.restarts_script:
            yield Problem(
                "mode `run` needs this project's agent, but kubernetes.launcher is hyperpodrun",
                path="mode",
                hint="write `kubernetes.launcher: ours`, or `mode: ours`",
            )
        if job.compat is not None:
            yield Problem(
                "has no effect under hyperpodrun, which starts the script without this project's agent",
                path="compat",
                hint="write `kubernetes.launcher: ours`, or remove compat",
            )
        if job.restart.policy == "continue" and job.mode == "ours":
            yield Problem(
                "`continue` does not work under hyperpodrun, which stops all ranks after a fault",
                path="restart.policy",
                hint="write `kubernetes.launcher: ours`, or `policy: wait`",
            )
        for index, tier in enumerate(job.checkpoint.tiers):
            if isinstance(tier, PeerTier) and tier.parity is not None:
                yield Problem(
                    "hyperpodrun does not support parity",
                    path=f"checkpoint.tiers.{index}.parity",
                    hint="write `kubernetes.launcher: ours`, or use `replicas` instead",
                )
        return
    if not job.has_agent:
        yield Problem(
            f"launcher `ours` works only with mode ours or run, but the mode is {job.mode}",
            path="kubernetes.launcher",
            hint="write `launcher: hyperpodrun`, or `mode: ours`",
        )


def _of_ports(job: JobConfig) -> Iterator[Problem]:
    """Yield a problem for each field whose value is the port that the operator uses to control pods."""
    ports = {
        "metrics.port": job.metrics.port if job.metrics is not None else None,
        "rendezvous.port": job.rendezvous.port,
    }
    for path, port in ports.items():
        if port == labels.AGENT_PORT:
            message = (
                f"port {port} is reserved: the operator controls pods through it, and the NetworkPolicy closes it "
                f"to other clients"
            )
            yield Problem(message, path=path, hint=f"write another port, such as {port + 1}")


def _of_variables(job: JobConfig) -> Iterator[Problem]:
    """Yield a problem for each field that sets the environment variable with the number of nodes, which the operator
    sets itself."""
    only, overlaid = job.kubernetes, job.overlay.kubernetes.container.get("env")
    named = [(f"env.{name}", name) for name in job.env]
    named += [(f"kubernetes.secret_env.{index}.name", one.name) for index, one in enumerate(only.secret_env)]
    own = enumerate(only.container.get("env", ()))
    named += [(f"kubernetes.container.env.{index}.name", one["name"]) for index, one in own]
    for index, one in enumerate(overlaid if isinstance(overlaid, list) else ()):
        named.append(
            (
                f"overlay.kubernetes.container.env.{index}",
                str(one["name"]) if isinstance(one, dict) and "name" in one else "",
            )
        )
    for path, name in named:
        if name == NODES_OF_OPERATOR:
            message = f"{name} is set by the operator to the number of nodes"
            yield Problem(message, path=path, hint="remove it, or choose another name")


def list_jobs() -> list[JobStatus]:
    """Return the status of all HyperPodPyTorchJobs in the namespace of the kubeconfig's current context."""
    from hyperpod_ext.jobs.kubernetes import jobs

    return jobs.list_jobs(HYPERPOD)


if TYPE_CHECKING:
    import hyperpod_ext.jobs.kubernetes.hyperpod_eks as this_module

    _checked: Target = this_module
