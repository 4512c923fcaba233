"""Checks that find mistakes in valid specs of clusters, such as machines that cost money without training anything.

The ids of cluster checks begin with HPX201. docs/clusters.md lists all checks.
"""

from __future__ import annotations

from collections.abc import Iterator

from hyperpod_ext.config.clusters.cluster import ClusterConfig, InstanceGroup
from hyperpod_ext.config.clusters.cluster_parts import RestrictedGroup
from hyperpod_ext.config.files.rule import Registry

Group = InstanceGroup | RestrictedGroup
_MODULES = ("capacity", "places", "regions", "set_up", "uses")


REGISTRY: Registry[ClusterConfig] = Registry(__name__, _MODULES)
check, all_checks, findings = REGISTRY.rule, REGISTRY.all, REGISTRY.findings


def groups_of(cluster: ClusterConfig) -> Iterator[tuple[str, Group]]:
    """Yield every group of a cluster, including restricted groups, with the path of the group in the spec."""
    for field in ("instance_groups", "restricted_groups"):
        for index, group in enumerate(getattr(cluster, field)):
            yield f"{field}.{index}", group


def named_types(cluster: ClusterConfig) -> Iterator[tuple[str, str]]:
    """Yield every instance type that a cluster's groups name, with the path of the type in the spec."""
    for path, group in groups_of(cluster):
        yield f"{path}.instance_type", group.instance_type
        if isinstance(group, InstanceGroup):
            for index, other in enumerate(group.other_types):
                yield f"{path}.other_types.{index}", other
