"""What machines need to become part of the cluster: roles, scripts, Slurm's parts, memory that is left."""

from __future__ import annotations

from collections.abc import Iterator

from hyperpod_ext.clusters.checks import check, groups_of
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.errors import Problem

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
