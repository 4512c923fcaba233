"""Checks of the set-up of machines: roles, scripts, Slurm's node types, reserved memory."""

from __future__ import annotations

from collections.abc import Iterator

from hyperpod_ext.catalog.regions import kubernetes_versions
from hyperpod_ext.clusters.checks import check, groups_of
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.errors import Problem

_GOVERNANCE_NEEDS = 30
"""Oldest minor version of Kubernetes that AWS's task governance runs on (HyperPod's documentation, 2026-11)."""
_LONGEST_ROLE = 64
"""IAM's limit for names of roles."""


@check(
    "HPX205",
    "error",
    "nothing makes machines part of Slurm",
    "Without node types HyperPod's set-up does not know which group is the controller, and without lifecycle scripts "
    "nobody else says so: the machines run, and Slurm is not there.",
    "Give each group slurm.node_type, or lifecycle scripts.",
)
def slurm_is_set_up(cluster: ClusterConfig) -> Iterator[Problem]:
    if cluster.orchestrator != "slurm" or any(group.slurm for group in cluster.instance_groups):
        return
    for index, group in enumerate(cluster.instance_groups):
        if group.lifecycle is None:
            hint = "write lifecycle: {source: s3://...}, or slurm: {node_type: ...} for each group"
            message = "the group has neither lifecycle scripts nor a part in Slurm"
            yield Problem(message, path=f"instance_groups.{index}", hint=hint)


@check(
    "HPX206",
    "error",
    "a role whose name is too long",
    "Names of IAM roles have at most 64 characters, so that there can be no such role: machines that cannot assume it "
    "never join.",
    "Correct the ARN; what follows the last / is the name.",
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
            message = f"the role's name has {len(name)} characters, and IAM allows {_LONGEST_ROLE}"
            yield Problem(message, path=path, hint=f"shorten `{name}`")


@check(
    "HPX208",
    "error",
    "a lifecycle script that is not in its folder",
    "Every new machine runs the script before it takes work; without it each one is started, fails, and is given up.",
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
                yield Problem(f"there is no {file}", path=path, hint="upload it, or correct the name")


@check(
    "HPX209",
    "error",
    "a version of Kubernetes that HyperPod or its add-ons do not take",
    "HyperPod refuses an EKS cluster whose Kubernetes is too old or too new, and its task governance needs 1.30. EKS "
    "itself is made, or upgraded, and paid before that shows.",
    "Upgrade the EKS cluster, or take one with a version that fits.",
)
def kubernetes_fits(cluster: ClusterConfig) -> Iterator[Problem]:
    stated = cluster.account.eks_version if cluster.account else None
    if stated is None or cluster.eks_cluster_arn is None:
        return
    minor = int(stated.partition(".")[2])
    (_, oldest), (_, newest) = kubernetes_versions()
    made = cluster.infrastructure
    if not oldest <= minor <= newest:
        message = f"the EKS cluster runs Kubernetes {stated}, and HyperPod takes 1.{oldest} to 1.{newest}"
        yield Problem(message, path="eks_cluster_arn", hint=f"take one with 1.{newest}")
    elif made is not None and made.add_ons.task_governance is not None and minor < _GOVERNANCE_NEEDS:
        message = f"task governance needs Kubernetes 1.{_GOVERNANCE_NEEDS}, and the EKS cluster runs {stated}"
        yield Problem(message, path="infrastructure.add_ons.task_governance", hint="upgrade the EKS cluster")


@check(
    "HPX207",
    "error",
    "a memory tier that leaves nothing to jobs",
    "The share is set aside on every node whether it is used or not; with all of it no pod can be placed.",
    "Leave most of the memory to jobs; AWS's own default is 20.",
)
def the_tier_leaves_memory(cluster: ClusterConfig) -> Iterator[Problem]:
    tiered = cluster.tiered_storage
    if tiered is not None and tiered.enabled and (tiered.memory_percent or 0) >= 95:
        message = f"{tiered.memory_percent} % of every node's memory leave nothing to pods"
        yield Problem(message, path="tiered_storage.memory_percent", hint="write 20")
