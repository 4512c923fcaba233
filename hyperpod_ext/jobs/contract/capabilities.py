"""Capabilities of each target, and checks that the target of a job has all capabilities that the job needs.

The checks run before any file is rendered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hyperpod_ext.config.checkpoint import DurableTier
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import Problem

OF_PODS = ("working_dir", "resources", "libraries", "scheduling", "node_groups", "volumes", "relaunch", "timeouts")
"""Optional parts of a spec that affect the rendered pods."""
_OPTIONAL = (
    *OF_PODS,
    *("log_rules", "labels", "annotations", "kubernetes", "slurm", "sagemaker", "metrics", "network"),
)
"""Parts of a spec that some targets read and other targets ignore."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of jobs that one target supports."""

    orchestrator: str = ""
    """Orchestrator of HyperPod clusters that starts the target's jobs: `eks`, `slurm`, or empty if there is none."""
    pod_suffix: str = ""
    """Longest suffix of the pods' names after the job's name; empty if the target has no pods."""
    no_node_disk: str = ""
    """Reason, as a sentence, why nodes have no disk that outlives the job's processes; empty if nodes have such a
    disk."""
    chaos: bool = False
    """Whether a spec may inject faults without `chaos.on_clusters`, because the target's machines cost nothing."""
    image: bool = False
    """Whether workers run in a container image."""
    elastic: bool = False
    """Whether a running job can be resized to fewer or more nodes."""
    spares: bool = False
    """Whether a job may have spare nodes, which wait without ranks until another node fails."""
    process_restart: bool = False
    """Whether a failed worker can be replaced while the other workers keep running."""
    aws_checkpointless: bool = False
    """Whether the target supports mode aws-checkpointless, AWS's own recovery without checkpoints."""
    managed_tier: bool = False
    """Whether the target supports mode aws-managed-tier, AWS's own tiered checkpointing."""
    command: bool = False
    """Whether workers can run a command that is not a Python script."""
    reads: frozenset[str] = frozenset()
    """Optional parts of a spec that the target reads. A spec with other optional parts gets a warning."""


def unsupported(job: JobConfig, target: str, can: Capabilities) -> Iterator[Problem]:
    """Yield a problem for each part of `job` that `target` does not support."""
    for index, tier in enumerate(job.checkpoint.tiers):
        if can.no_node_disk and isinstance(tier, DurableTier) and tier.on_node:
            yield Problem(
                f"target {target} has no {tier.kind} tier: {can.no_node_disk}",
                path=f"checkpoint.tiers.{index}",
                hint="use a tier of kind s3",
            )
    with_agents = "network" in can.reads and job.has_agent
    if job.network is not None and job.network.tls and not with_agents:
        where = f"mode {job.mode}" if "network" in can.reads else f"target {target}"
        yield Problem(
            f"{where} does not support TLS between nodes",
            path="network.tls",
            hint="remove network.tls; to encrypt, use a network that encrypts: see docs/security.md",
        )
    if job.chaos is not None and not can.chaos:
        yield from _no_rehearsal(job, target)
    if job.command is not None and not can.command:
        yield Problem(
            f"target {target} starts only Python scripts",
            path="command",
            hint="write a script that runs the command, or use another --target",
        )
    if job.spares and not can.spares:
        yield Problem(
            f"target {target} does not support spare nodes",
            path="spares",
            hint="remove spares",
        )
    modes = {"aws-checkpointless": can.aws_checkpointless, "aws-managed-tier": can.managed_tier}
    if not modes.get(job.mode, True):
        yield Problem(
            f"target {target} does not support mode {job.mode}, which AWS offers only on HyperPod with EKS",
            path="mode",
            hint="write `mode: ours`, or use --target hyperpod-eks",
        )
    if job.elastic is not None and not can.elastic:
        yield Problem(
            f"target {target} cannot change the number of nodes of a running job",
            path="elastic",
            hint="remove elastic; the job then runs on exactly `nodes`",
        )


def _no_rehearsal(job: JobConfig, target: str) -> Iterator[Problem]:
    assert job.chaos is not None
    if not job.has_agent:
        yield Problem(f"faults cannot be injected into jobs of mode {job.mode}", path="chaos", hint="remove chaos")
    elif not job.chaos.on_clusters:
        yield Problem(
            f"machines of target {target} cost money, so faults there need chaos.on_clusters",
            path="chaos",
            hint="write `on_clusters: true`, or use --target local",
        )


def unused(job: JobConfig, target: str, can: Capabilities) -> Iterator[str]:
    """Yield a warning for each part of `job` that `target` ignores."""
    if job.image is not None and not can.image:
        yield f"image is ignored on {target}: workers run in this Python environment"
    if job.log_rules and not job.has_agent and "network" in can.reads:
        yield f"log_rules is ignored on {target} in mode {job.mode}: it needs this project's agent (mode ours)"
    for name in _OPTIONAL:
        if name not in can.reads and getattr(job, name) != type(job).model_fields[name].default:
            yield f"{name} is ignored on {target}{_in_words(job) if name == 'kubernetes' else ''}"


def _in_words(job: JobConfig) -> str:
    """Return the fields in `kubernetes.container` and `kubernetes.pod` as text for a warning; empty without fields."""
    found = [f"{section}.{name}" for section in ("container", "pod") for name in getattr(job.kubernetes, section)]
    return f", including {', '.join(found)}" if found else ""
