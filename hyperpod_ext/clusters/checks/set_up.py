"""Checks of settings for the set-up of machines: roles, scripts, node types of Slurm, reserved memory."""

from __future__ import annotations

from collections.abc import Iterator

from hyperpod_ext.catalog.regions import kubernetes_versions
from hyperpod_ext.clusters.checks import check, groups_of
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.errors import Problem

_GOVERNANCE_NEEDS = 30
"""Oldest version of Kubernetes that AWS's task governance supports, as the number after `1.`. Source: HyperPod's
documentation, 2026-11."""
_LONGEST_ROLE = 64
"""Maximum number of characters that IAM allows in the name of a role."""


@check(
    "HPX205",
    "error",
    "machines that do not join Slurm",
    "HyperPod's set-up installs Slurm only if groups have node types. Lifecycle scripts can install Slurm, too. "
    "Without both, the machines run without Slurm.",
    "Set slurm.node_type in each group, or use lifecycle scripts.",
)
def slurm_is_set_up(cluster: ClusterConfig) -> Iterator[Problem]:
    if cluster.orchestrator != "slurm" or any(group.slurm for group in cluster.instance_groups):
        return
    for index, group in enumerate(cluster.instance_groups):
        if group.lifecycle is None:
            hint = "write lifecycle: {source: s3://...}, or slurm: {node_type: ...} for each group"
            message = "the group has neither lifecycle scripts nor slurm.node_type"
            yield Problem(message, path=f"instance_groups.{index}", hint=hint)


@check(
    "HPX206",
    "error",
    "the name of a role is too long",
    "Names of IAM roles have at most 64 characters, so this role cannot exist. Machines that cannot assume their "
    "role never join.",
    "Correct the ARN. The role's name is the part after the last slash.",
)
def role_names_fit(cluster: ClusterConfig) -> Iterator[Problem]:
    made = cluster.infrastructure
    roles = [("execution_role", cluster.execution_role), ("cluster_role", cluster.cluster_role)]
    roles += [(f"{path}.execution_role", group.execution_role) for path, group in groups_of(cluster)]
    if made is not None:
        roles += [(f"infrastructure.eks.admins.{index}", role) for index, role in enumerate(made.eks.admins)]
    for path, role in roles:
        name = (role or "").rpartition("/")[2]
        if len(name) > _LONGEST_ROLE:
            message = f"the role's name has {len(name)} characters, but IAM allows at most {_LONGEST_ROLE}"
            yield Problem(message, path=path, hint=f"shorten `{name}`")


@check(
    "HPX208",
    "error",
    "a missing lifecycle script",
    "Every new machine runs the script before it accepts jobs. If the script is missing, AWS starts each machine, and "
    "gives up on the machine after the failure.",
    "Upload the script, or correct its name or its folder.",
)
def scripts_are_there(cluster: ClusterConfig) -> Iterator[Problem]:
    there = cluster.account.lifecycle_files if cluster.account else None
    if there is None:
        return
    for index, group in enumerate(cluster.instance_groups):
        for field in ("on_create", "on_init_complete"):
            name = getattr(group.lifecycle, field, None)
            file = f"{group.lifecycle.source.rstrip('/')}/{name}" if group.lifecycle else ""
            if name is not None and file not in there:
                where = f"instance_groups.{index}.lifecycle"
                path = f"{where}.{field}" if field in (group.lifecycle or group).model_fields_set else f"{where}.source"
                hint = f"upload the script, or correct lifecycle.source or lifecycle.{field}"
                yield Problem(f"there is no {file}", path=path, hint=hint)


@check(
    "HPX209",
    "error",
    "a version of Kubernetes that HyperPod or its add-ons do not support",
    "HyperPod refuses an EKS cluster whose Kubernetes is too old or too new, and task governance needs Kubernetes "
    "1.30. When HyperPod refuses the EKS cluster, the EKS cluster exists already, and costs money.",
    "Upgrade the EKS cluster, or use an EKS cluster with a supported version.",
)
def kubernetes_fits(cluster: ClusterConfig) -> Iterator[Problem]:
    stated = cluster.account.eks_version if cluster.account else None
    if stated is None or cluster.eks_cluster_arn is None:
        return
    minor = int(stated.partition(".")[2])
    (_, oldest), (_, newest) = kubernetes_versions()
    made = cluster.infrastructure
    if not oldest <= minor <= newest:
        message = f"the EKS cluster runs Kubernetes {stated}, but HyperPod supports 1.{oldest} to 1.{newest}"
        yield Problem(message, path="eks_cluster_arn", hint=f"use an EKS cluster with 1.{newest}")
    elif made is not None and made.add_ons.task_governance is not None and minor < _GOVERNANCE_NEEDS:
        message = f"task governance needs Kubernetes 1.{_GOVERNANCE_NEEDS}, but the EKS cluster runs {stated}"
        yield Problem(message, path="infrastructure.add_ons.task_governance", hint="upgrade the EKS cluster")


@check(
    "HPX207",
    "error",
    "a memory tier that leaves no memory for jobs",
    "The memory is reserved on every node, even if the tier does not use it. If the tier reserves all memory, no pod "
    "can be scheduled.",
    "Leave most of the memory to jobs. AWS's default is memory_percent: 20.",
)
def the_tier_leaves_memory(cluster: ClusterConfig) -> Iterator[Problem]:
    tiered = cluster.tiered_storage
    if tiered is not None and tiered.enabled and (tiered.memory_percent or 0) >= 95:
        message = f"the tier reserves {tiered.memory_percent} % of every node's memory, which is too much for pods"
        yield Problem(message, path="tiered_storage.memory_percent", hint="write 20")
