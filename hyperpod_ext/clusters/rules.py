"""Checks that compare several fields of a cluster's spec, and that AWS also makes. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from hyperpod_ext.config.clusters.cluster import ClusterConfig, InstanceGroup
from hyperpod_ext.config.clusters.cluster_parts import RestrictedGroup
from hyperpod_ext.errors import Problem


def problems(cluster: ClusterConfig) -> Iterator[Problem]:
    """Yield a problem for every reason why AWS would refuse `cluster`, and for every probable mistake in it."""
    yield from (_on_eks if cluster.orchestrator == "eks" else _on_slurm)(cluster)
    yield from _shared(cluster)
    if not (cluster.instance_groups or cluster.restricted_groups):
        hint = "write instance_groups, or restricted_groups"
        yield Problem("a cluster needs at least one group of machines", path="instance_groups", hint=hint)
    for index, group in enumerate(cluster.instance_groups):
        yield from _group(cluster, group, f"instance_groups.{index}")
    names = [one.name for one in cluster.instance_groups] + [one.name for one in cluster.restricted_groups]
    for index, restricted in enumerate(cluster.restricted_groups):
        path = f"restricted_groups.{index}"
        yield from _disks(restricted, path)
        yield from _rollouts(restricted, path)
        if names.count(restricted.name) > 1:
            yield Problem(f"another group already has the name `{restricted.name}`", path=f"{path}.name", hint=_RENAME)
        if not (restricted.execution_role or cluster.execution_role):
            yield _required(cluster, f"{path}.execution_role", _ROLE)


def _required(cluster: ClusterConfig, path: str, hint: str, reason: str = "") -> Problem:
    """Return the problem that the field `path` is missing. If the cluster has a section `infrastructure`, the hint says
    that `hp-ext cluster deploy` creates the resource."""
    if cluster.infrastructure is not None:
        hint = "`hp-ext cluster deploy` creates it; for `hp-ext cluster create`, write an existing one"
    return Problem(f"is required{reason}", path=path, hint=hint)


_RENAME = "give each group a different name"
WITH_DRAIN = "with strategy DrainFirst"
"""End of messages about fields that only the patch strategy DrainFirst allows or requires."""
_SLURM_ONLY = "remove it, or use orchestrator slurm"
_ROLE = "write the ARN of the machines' role, here or once in execution_role of the cluster"


def _on_eks(cluster: ClusterConfig) -> Iterator[Problem]:
    if cluster.eks_cluster_arn is None:
        hint = "write the ARN of the EKS cluster that the machines join"
        yield _required(cluster, "eks_cluster_arn", hint, " with orchestrator eks")
    if cluster.slurm is not None:
        yield Problem("is only valid for orchestrator slurm", path="slurm", hint=_SLURM_ONLY)
    if cluster.vpc is None:
        hint = "write subnets and security groups that reach the EKS cluster"
        yield _required(cluster, "vpc", hint, " with orchestrator eks")
    for index, group in enumerate(cluster.instance_groups):
        if group.slurm is not None:
            path = f"instance_groups.{index}.slurm"
            yield Problem("is only valid for orchestrator slurm", path=path, hint=_SLURM_ONLY)


def _on_slurm(cluster: ClusterConfig) -> Iterator[Problem]:
    eks = "remove it, or use orchestrator eks"
    for path, value in (
        ("eks_cluster_arn", cluster.eks_cluster_arn),
        ("tiered_storage", cluster.tiered_storage),
        ("auto_scaling", cluster.auto_scaling),
        ("restricted_groups", cluster.restricted_groups),
    ):
        if value:
            yield Problem("is only valid for orchestrator eks", path=path, hint=eks)
    for index, group in enumerate(cluster.instance_groups):
        for field in ("labels", "taints"):
            if getattr(group, field):
                yield Problem("is only valid for orchestrator eks", path=f"instance_groups.{index}.{field}", hint=eks)
    accounting = cluster.slurm is not None and cluster.slurm.accounting is not None
    if accounting and not cluster.continuous_provisioning:
        yield Problem("is required with slurm.accounting", path="continuous_provisioning", hint="write true")
    parts = [group.slurm.node_type if group.slurm else None for group in cluster.instance_groups]
    if not any(parts):
        return  # the spec sets no node types, so lifecycle scripts assign them
    for index, part in enumerate(parts):
        if part is None:
            hint = "write node_type Controller, Login or Compute, as in the other groups"
            yield Problem(
                "is required, because other groups have one", path=f"instance_groups.{index}.slurm", hint=hint
            )
    controllers = [index for index, part in enumerate(parts) if part == "Controller"]
    if len(controllers) != 1:
        hint = "set node_type: Controller in exactly one group"
        where = f"instance_groups.{controllers[1]}.slurm.node_type" if controllers else "instance_groups"
        yield Problem(f"{len(controllers)} groups have node_type Controller", path=where, hint=hint)
    for index, group in enumerate(cluster.instance_groups):
        if group.slurm and group.slurm.node_type == "Controller" and group.count != 1:
            hint = "write 1"
            yield Problem("a controller has exactly one machine", path=f"instance_groups.{index}.count", hint=hint)
        if group.slurm and group.slurm.node_type != "Compute" and group.slurm.partition:
            hint = "remove it"
            path = f"instance_groups.{index}.slurm.partition"
            yield Problem("only compute nodes have partitions", path=path, hint=hint)


def _shared(cluster: ClusterConfig) -> Iterator[Problem]:
    scaling = cluster.auto_scaling
    if scaling is not None and scaling.enabled and cluster.orchestrator == "eks":  # Slurm has no auto_scaling
        if cluster.cluster_role is None:
            hint = "write the role with which HyperPod adds and removes machines"
            yield _required(cluster, "cluster_role", hint, " with auto_scaling")
        if not cluster.continuous_provisioning:
            hint = "write true"
            yield Problem("is required with auto_scaling", path="continuous_provisioning", hint=hint)
    tiered = cluster.tiered_storage
    if tiered is not None and not tiered.enabled and tiered.memory_percent is not None:
        hint = "remove it, or enable the tier"
        yield Problem("reserves memory for a disabled tier", path="tiered_storage.memory_percent", hint=hint)
    if cluster.restricted_environment is not None and not cluster.restricted_groups:
        hint = "remove it, or add restricted_groups"
        yield Problem(
            "is only valid with restricted groups, and the cluster has none", path="restricted_environment", hint=hint
        )


def _disks(group: InstanceGroup | RestrictedGroup, path: str) -> Iterator[Problem]:
    """Check the disks of a group by the rules in AWS's documentation of ClusterEbsVolumeConfig."""
    for root, what in ((True, "root disk"), (False, "additional disk")):
        if sum(one.kind == "ebs" and one.root == root for one in group.storage) > 1:
            hint = f"keep one entry with root: {str(root).lower()}"
            yield Problem(f"a machine can have at most one {what}", path=f"{path}.storage", hint=hint)
    for index, one in enumerate(group.storage):
        where = f"{path}.storage.{index}"
        if one.kind != "ebs":
            continue
        if one.root and one.size_gib is not None:
            yield Problem(
                "the size of the root disk cannot be set; AWS chooses it", path=f"{where}.size_gib", hint="remove it"
            )
        if one.root and one.kms_key is None:
            hint = "write the key that encrypts the root disk, or remove this entry to use AWS's key"
            yield Problem("is required for the root disk", path=f"{where}.kms_key", hint=hint)
        if not one.root and one.size_gib is None:
            yield Problem(
                "is required for an additional disk",
                path=f"{where}.size_gib",
                hint="write the size in GiB, such as 500",
            )


def _patches(cluster: ClusterConfig, group: InstanceGroup, path: str) -> Iterator[Problem]:
    """Check the automatic patches of a group by the rules in AWS's documentation of ClusterAutoPatchConfig."""
    patch = group.auto_patch
    if patch is None:
        return
    drains = patch.strategy == "DrainFirst"
    for field in ("drain_timeout_s", "on_drain_timeout"):
        if getattr(patch, field) is not None and not drains:
            hint = "remove it, or write strategy: DrainFirst"
            yield Problem(f"is only valid {WITH_DRAIN}", path=f"{path}.{field}", hint=hint)
    if drains and cluster.orchestrator != "eks":
        hint = "write WhenIdle or WhenAllIdle"
        yield Problem("DrainFirst is only valid for orchestrator eks", path=f"{path}.strategy", hint=hint)
    if drains and (patch.rollout is None or patch.rollout.batch is None):
        field = "rollout" if patch.rollout is None else "rollout.batch"
        hint = "write the number of nodes to drain at once, such as rollout: {batch: {nodes: 1}}"
        yield Problem(f"is required {WITH_DRAIN}", path=f"{path}.{field}", hint=hint)


def _rollouts(group: InstanceGroup | RestrictedGroup, path: str) -> Iterator[Problem]:
    """Check that each rollout with a `rollback_batch` also has a `batch`."""
    update, patch = group.scheduled_update, getattr(group, "auto_patch", None)
    for field, owner in (("scheduled_update", update), ("auto_patch", patch)):
        rollout = owner.rollout if owner is not None else None
        if rollout is not None and rollout.rollback_batch is not None and rollout.batch is None:
            hint = "add batch"
            yield Problem("is required with rollback_batch", path=f"{path}.{field}.rollout.batch", hint=hint)


def _group(cluster: ClusterConfig, group: InstanceGroup, path: str) -> Iterator[Problem]:
    if not (group.execution_role or cluster.execution_role):
        yield _required(cluster, f"{path}.execution_role", _ROLE)
    if group.min_count is not None:
        if group.min_count > group.count:
            yield Problem("is more than count", path=f"{path}.min_count", hint=f"write at most {group.count}")
        if not cluster.continuous_provisioning:
            hint = "write continuous_provisioning: true, or remove it"
            yield Problem("needs continuous provisioning", path=f"{path}.min_count", hint=hint)
    if group.capacity == "spot" and group.training_plan:
        hint = "remove capacity or training_plan"
        yield Problem("spot is not valid with training_plan", path=f"{path}.capacity", hint=hint)
    if group.training_plan and group.other_types:
        hint = "remove other_types or training_plan"
        message = "is not valid with training_plan, because a plan is for one instance type"
        yield Problem(message, path=f"{path}.other_types", hint=hint)
    if len({group.instance_type, *group.other_types}) <= len(group.other_types):
        yield Problem("has a type twice", path=f"{path}.other_types", hint="list each type once")
    yield from _disks(group, path)
    yield from _patches(cluster, group, f"{path}.auto_patch")
    yield from _rollouts(group, path)
    if len(set(group.deep_health_checks)) < len(group.deep_health_checks):
        yield Problem("has a check twice", path=f"{path}.deep_health_checks", hint="list each check once")
    if group.lifecycle and not (group.lifecycle.on_create or group.lifecycle.on_init_complete):
        hint = "set on_create or on_init_complete, or remove lifecycle"
        yield Problem("has no script", path=f"{path}.lifecycle", hint=hint)
