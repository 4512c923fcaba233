"""Computes the changes that an update of a cluster makes, from a ClusterConfig and the response of DescribeCluster.
Pure.

Only fields that the spec sets are compared, because AWS chooses the values of unset fields. UpdateCluster cannot make
every change: some changes need a new group or a new cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal

from hyperpod_ext.clusters.request import Request, create_cluster_request, given
from hyperpod_ext.config.clusters.cluster import ClusterConfig

Effect = Literal["update", "add", "delete group", "tag", "replace group", "replace cluster"]

_GROUPS = ("InstanceGroups", "RestrictedInstanceGroups")
_NOT_UPDATED = {"VpcConfig": "replace cluster", "Orchestrator.Eks": "replace cluster"}
OF_A_NEW_GROUP = frozenset(
    {
        "InstanceType",
        "InstanceRequirements",
        "ThreadsPerCore",
        "TrainingPlanArn",
        "OverrideVpcConfig",
        "CapacityRequirements",
        "NetworkInterface",
    }
)
"""Members of a group that UpdateCluster cannot change: a change of one of these members needs a new group."""


@dataclass(frozen=True, slots=True)
class RequestChange:
    """One difference between a cluster's spec and the existing cluster."""

    path: str
    """Path of the changed member, in the names of SageMaker's API, such as `InstanceGroups.workers.InstanceCount`."""
    before: Any
    after: Any
    effect: Effect

    def __str__(self) -> str:
        sign = {"add": "+", "delete group": "-", "replace group": "!", "replace cluster": "!"}.get(self.effect, "~")
        note = f"  ({self.effect})" if sign == "!" else ""
        return f"{sign} {self.path}: {_short(self.before)} -> {_short(self.after)}{note}"

    def to_json(self) -> dict[str, Any]:
        """Return the change as JSON."""
        return asdict(self)


def find_changes(cluster: ClusterConfig, described: Mapping[str, Any], tags: Mapping[str, str]) -> list[RequestChange]:
    """Return all differences between the spec `cluster` and the existing cluster.

    Args:
        described: response of DescribeCluster for the existing cluster.
        tags: tags of the existing cluster, from ListTags.
    """
    wanted, has = create_cluster_request(cluster), as_requested(described)
    found = list(_tags(cluster.tags, tags))
    for member, value in wanted.items():
        if member in _GROUPS:
            found += _groups(member, value, has.get(member, []))
        elif member not in ("ClusterName", "Tags"):
            found += _members(member, has.get(member), value)
    for kind in _GROUPS:
        if kind not in wanted:
            found += _groups(kind, [], has.get(kind, []))
    return sorted(found, key=lambda change: change.path)


def update_cluster_request(cluster: ClusterConfig, changes: list[RequestChange]) -> Request | None:
    """Return the UpdateCluster request that makes the changes `changes`; None if the request would change nothing.

    A changed group is sent with all of its settings, because SageMaker replaces the settings of a group as a whole.
    """
    mine = [change for change in changes if change.effect in ("update", "add", "delete group")]
    if not mine:
        return None
    wanted = create_cluster_request(cluster)
    request: Request = {"ClusterName": cluster.name}
    for member in sorted({change.path.partition(".")[0] for change in mine} - set(_GROUPS)):
        request[member] = wanted[member]
    for kind in _GROUPS:
        names = {_group_of(change) for change in mine if change.path.startswith(f"{kind}.")}
        groups = [group for group in wanted.get(kind, []) if group["InstanceGroupName"] in names]
        if groups:
            request[kind] = groups
    gone = [_group_of(change) for change in mine if change.effect == "delete group"]
    return request | given(InstanceGroupsToDelete=gone)


def as_requested(described: Mapping[str, Any]) -> Request:
    """Convert the response of DescribeCluster to the form of a CreateCluster request. Where AWS returns a desired and a
    current value, the desired value is used."""
    found = {
        name: described[name]
        for name in ("VpcConfig", "Orchestrator", "NodeRecovery", "TieredStorageConfig", "NodeProvisioningMode")
        if name in described
    }
    if "ClusterRole" in described:
        found["ClusterRole"] = described["ClusterRole"]
    if "AutoScaling" in described:
        scaling = described["AutoScaling"]
        found["AutoScaling"] = given(Mode=scaling.get("Mode"), AutoScalerType=scaling.get("AutoScalerType"))
    if "RestrictedInstanceGroupsConfig" in described:
        shared = described["RestrictedInstanceGroupsConfig"]["SharedEnvironmentConfig"]
        found["RestrictedInstanceGroupsConfig"] = {"SharedEnvironmentConfig": _desired(shared)}
    for kind in _GROUPS:
        if described.get(kind):
            found[kind] = [_group_as_requested(group) for group in described[kind]]
    return found


_RENAMED = {
    "TargetCount": "InstanceCount",
    "MinCount": "MinInstanceCount",
    "DesiredImageId": "ImageId",
    "DesiredImageReleaseVersion": "ImageReleaseVersion",
}
_STATE = frozenset(
    {
        *(
            "CurrentCount",
            "InstanceTypeDetails",
            "Status",
            "TrainingPlanStatus",
            "CurrentImageId",
            "ImageVersionStatus",
        ),
        *("CurrentImageReleaseVersion", "ActiveOperations", "TargetStateCount", "SoftwareUpdateStatus"),
        "ActiveSoftwareUpdateConfig",
    }
)


def _group_as_requested(group: Mapping[str, Any]) -> Request:
    found = {_RENAMED.get(name, name): value for name, value in group.items() if name not in _STATE}
    found.setdefault("ImageId", group.get("CurrentImageId"))
    found.setdefault("ImageReleaseVersion", group.get("CurrentImageReleaseVersion"))
    for name in ("KubernetesConfig", "AutoPatchConfig", "InstanceRequirements"):
        if name in found:
            found[name] = _desired(found[name])
    if "S3OutputPath" in found.get("EnvironmentConfig", {}):
        found["EnvironmentConfig"] = {k: v for k, v in found["EnvironmentConfig"].items() if k != "S3OutputPath"}
    return found


def _desired(members: Mapping[str, Any]) -> Request:
    """Rename members of a response to their names in a request: `DesiredLabels` becomes `Labels`. If there are no
    desired labels, `CurrentLabels` becomes `Labels`."""
    found = {name.removeprefix("Current"): value for name, value in members.items() if name.startswith("Current")}
    rest = {name.removeprefix("Desired"): value for name, value in members.items() if not name.startswith("Current")}
    return found | rest


def _groups(kind: str, wanted: list[Request], has: list[Request]) -> Iterator[RequestChange]:
    known = {group["InstanceGroupName"]: group for group in has}
    for group in wanted:
        name = group["InstanceGroupName"]
        before = known.pop(name, None)
        if before is None:
            yield RequestChange(f"{kind}.{name}", None, group, "add")
            continue
        for member, value in group.items():
            effect: Effect = "replace group" if member in OF_A_NEW_GROUP else "update"
            if not _covers(before.get(member), value):
                yield RequestChange(f"{kind}.{name}.{member}", before.get(member), value, effect)
    for name, group in known.items():
        yield RequestChange(f"{kind}.{name}", group, None, "delete group")


def _members(path: str, before: Any, after: Any) -> Iterator[RequestChange]:
    """Yield the changes of the member `path`, split into parts that can be updated separately."""
    if _covers(before, after):
        return
    if path == "Orchestrator" and isinstance(after, Mapping):
        for name, value in after.items():
            if not _covers((before or {}).get(name), value):
                yield _change(f"{path}.{name}", (before or {}).get(name), value)
        return
    yield _change(path, before, after)


def _change(path: str, before: Any, after: Any) -> RequestChange:
    effect: Any = _NOT_UPDATED.get(path, "update")
    return RequestChange(path, before, after, effect)


def _tags(wanted: Mapping[str, str], has: Mapping[str, str]) -> Iterator[RequestChange]:
    for key, value in wanted.items():
        if has.get(key) != value:
            yield RequestChange(f"Tags.{key}", has.get(key), value, "tag")


def _covers(has: Any, wanted: Any) -> bool:
    """Return whether the existing value `has` contains every value that the spec sets in `wanted`."""
    if isinstance(wanted, Mapping):
        return isinstance(has, Mapping) and all(_covers(has.get(name), value) for name, value in wanted.items())
    if isinstance(wanted, list):
        if not isinstance(has, list | tuple) or len(has) != len(wanted):
            return False
        if all(isinstance(one, str) for one in wanted):
            return sorted(has) == sorted(wanted)  # the order of subnets and health checks does not matter
        return all(any(_covers(one, item) for one in has) for item in wanted)
    if isinstance(has, datetime):
        return has.isoformat().startswith(str(wanted).removesuffix("Z"))
    return bool(has == wanted)


def _group_of(change: RequestChange) -> str:
    return change.path.split(".")[1]


def _short(value: Any) -> str:
    if value is None:
        return "nothing"
    text = ", ".join(f"{k}={_short(v)}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
