"""Fills a cluster's spec with values that are known only during its deployment: subnets, roles, file systems. Pure.

The filled-in values may be CDK tokens, which are placeholders that CloudFormation replaces. Unset fields are filled
without validation, because tokens do not match the patterns in ClusterConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hyperpod_ext.config.clusters.cluster import ClusterConfig, InstanceGroup
from hyperpod_ext.config.clusters.cluster_parts import FsxLustre, Lifecycle, RestrictedGroup
from hyperpod_ext.config.job.sagemaker import Vpc

G = TypeVar("G", InstanceGroup, RestrictedGroup)


@dataclass(frozen=True, slots=True)
class Mount:
    """An FSx for Lustre file system that nodes mount."""

    dns_name: str
    mount_name: str
    path: str


@dataclass(frozen=True, slots=True)
class Bindings:
    """Values of a deployment that a cluster's spec needs. A field is None or empty if the deployment lacks the
    value."""

    subnets: tuple[str, ...] = ()
    """Ids of the machines' subnets."""
    security_groups: tuple[str, ...] = ()
    group_subnets: Mapping[str, str] = field(default_factory=dict)
    """Ids of subnets for groups that have their own availability zone, by the group's name."""
    execution_role: str | None = None
    cluster_role: str | None = None
    eks_cluster_arn: str | None = None
    mount: Mount | None = None
    lifecycle_source: str | None = None
    """S3 URI of the folder with the scripts that new nodes run."""
    lifecycle_script: str | None = None
    """Name of the script that a new node runs after HyperPod's own set-up."""


EXAMPLE = Bindings(
    subnets=("subnet-0",),
    security_groups=("sg-0",),
    execution_role="arn:aws:iam::123456789012:role/machines",
    cluster_role="arn:aws:iam::123456789012:role/hyperpod",
    eks_cluster_arn="arn:aws:eks:us-west-2:123456789012:cluster/x",
)
"""Placeholder values for resources that a deployment creates, so that a spec can be checked before the deployment."""


def bound(cluster: ClusterConfig, bindings: Bindings, *, scale: bool = True) -> ClusterConfig:
    """Return `cluster` with unset fields filled from `bindings`. With `scale=False`, every group has 0 machines."""
    eks = cluster.orchestrator == "eks"
    scaling = cluster.auto_scaling is not None and cluster.auto_scaling.enabled
    network = _vpc(bindings.subnets, bindings.security_groups)
    update: dict[str, Any] = {
        "vpc": cluster.vpc or network,
        "execution_role": cluster.execution_role or bindings.execution_role,
        "eks_cluster_arn": cluster.eks_cluster_arn or (bindings.eks_cluster_arn if eks else None),
        "cluster_role": cluster.cluster_role or (bindings.cluster_role if scaling else None),
        "instance_groups": tuple(_group(group, bindings, scale) for group in cluster.instance_groups),
        "restricted_groups": tuple(_counted(_placed(group, bindings), scale) for group in cluster.restricted_groups),
    }
    return cluster.model_copy(update=update)


def _group(group: InstanceGroup, bindings: Bindings, scale: bool) -> InstanceGroup:
    update: dict[str, Any] = {}
    if bindings.mount is not None and not any(storage.kind == "fsx-lustre" for storage in group.storage):
        update["storage"] = (*group.storage, _lustre(bindings.mount))
    if group.lifecycle is None and bindings.lifecycle_source is not None:
        update["lifecycle"] = Lifecycle.model_construct(
            source=bindings.lifecycle_source, on_create=None, on_init_complete=bindings.lifecycle_script
        )
    return _counted(_placed(group, bindings).model_copy(update=update), scale)


def _placed(group: G, bindings: Bindings) -> G:
    subnet = bindings.group_subnets.get(group.name)
    if group.vpc is not None or subnet is None:
        return group
    return group.model_copy(update={"vpc": _vpc((subnet,), bindings.security_groups)})


def _counted(group: G, scale: bool) -> G:
    if scale:
        return group
    least: dict[str, Any] = {"min_count": None} if isinstance(group, InstanceGroup) else {}
    return group.model_copy(update={"count": 0, **least})


def _vpc(subnets: tuple[str, ...], security_groups: tuple[str, ...]) -> Vpc | None:
    return Vpc.model_construct(subnets=subnets, security_groups=security_groups) if subnets else None


def _lustre(mount: Mount) -> FsxLustre:
    return FsxLustre.model_construct(
        kind="fsx-lustre", dns_name=mount.dns_name, mount_name=mount.mount_name, path=mount.path
    )
