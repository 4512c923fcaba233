"""Lists, describes and deletes existing HyperPod clusters by name."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from hyperpod_ext.clusters.request import Request
from hyperpod_ext.errors import ConflictError, HyperpodExtError, NotFoundError, WaitTimeoutError
from hyperpod_ext.jobs.sagemaker.client import call, client

_ASK_EVERY_S = 5.0
_BUSY = frozenset({"Creating", "Updating", "SystemUpdating", "RollingBack"})


def list_clusters(region: str | None) -> list[dict[str, Any]]:
    """Return every HyperPod cluster in the region, sorted by name. Each entry has the keys `name`, `status`,
    `created_at` and `arn`."""
    found = _pages("ListClusters", "ClusterSummaries", region, {})
    rows = [
        {
            "name": one["ClusterName"],
            "status": one["ClusterStatus"],
            "created_at": _iso_time(one.get("CreationTime")),
            "arn": one["ClusterArn"],
        }
        for one in found
    ]
    return sorted(rows, key=lambda row: str(row["name"]))


def describe(name: str, region: str | None) -> Mapping[str, Any]:
    """Return the response of DescribeCluster for the cluster `name`.

    Raises:
        NotFoundError: the region has no cluster with this name.
    """
    service = client("sagemaker", region)
    answer: Mapping[str, Any] = call(f"DescribeCluster {name}", lambda: service.describe_cluster(ClusterName=name))
    return answer


def summary(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the main parts of a DescribeCluster response: status, orchestrator, node recovery, and each group."""
    orchestrator = described.get("Orchestrator") or {}
    groups = [
        {
            "name": group["InstanceGroupName"],
            "instance_type": group.get("InstanceType"),
            "count": group.get("CurrentCount"),
            "target": group.get("TargetCount"),
            "status": group.get("Status"),
            "restricted": kind == "RestrictedInstanceGroups",
        }
        for kind in ("InstanceGroups", "RestrictedInstanceGroups")
        for group in described.get(kind) or []
    ]
    return {
        "name": described["ClusterName"],
        "status": described["ClusterStatus"],
        "failure": described.get("FailureMessage") or None,
        "arn": described["ClusterArn"],
        "created_at": _iso_time(described.get("CreationTime")),
        "orchestrator": "eks" if "Eks" in orchestrator else "slurm",
        "eks_cluster_arn": (orchestrator.get("Eks") or {}).get("ClusterArn"),
        "node_recovery": described.get("NodeRecovery"),
        "groups": groups,
    }


def nodes(name: str, region: str | None, group: str | None = None) -> list[dict[str, Any]]:
    """Return every node of a cluster, sorted by group and id. With `group`, return only the nodes of this group.

    Each entry has the keys `id`, `logical_id`, `group`, `instance_type`, `status`, `message`, `launched_at` and `host`.
    """
    query = {"ClusterName": name} | ({"InstanceGroupNameContains": group} if group else {})
    rows = [
        {
            "id": one["InstanceId"],
            "logical_id": one.get("NodeLogicalId"),
            "group": one["InstanceGroupName"],
            "instance_type": one.get("InstanceType"),
            "status": one["InstanceStatus"]["Status"],
            "message": one["InstanceStatus"].get("Message") or None,
            "launched_at": _iso_time(one.get("LaunchTime")),
            "host": one.get("PrivateDnsHostname"),
        }
        for one in _pages("ListClusterNodes", "ClusterNodeSummaries", region, query)
        if group in (None, one["InstanceGroupName"])
    ]
    return sorted(rows, key=lambda row: (str(row["group"]), str(row["id"])))


def delete_request(name: str, region: str | None) -> tuple[Request, list[dict[str, Any]]]:
    """Return the DeleteCluster request for the cluster `name`, and the nodes that the request would delete.

    Raises:
        ConflictError: the cluster is being changed, so AWS would refuse the request.
        NotFoundError: the region has no cluster with this name.
    """
    status = str(describe(name, region)["ClusterStatus"])
    if status in _BUSY:
        hint = f"wait until `hp-ext cluster describe {name}` shows InService or Failed"
        raise ConflictError(f"{name} has status {status}, and cannot be deleted now", hint=hint)
    return {"ClusterName": name}, nodes(name, region)


def delete(request: Request, region: str | None) -> str:
    """Send a DeleteCluster request, and return the cluster's ARN. AWS finishes the deletion later."""
    service, name = client("sagemaker", region), str(request["ClusterName"])

    def existing() -> Mapping[str, Any]:
        """Return the cluster's description if the cluster is being deleted, which means that a request with a lost
        response has succeeded."""
        described = describe(name, region)
        if described["ClusterStatus"] != "Deleting":
            raise NotFoundError(f"no deletion of {name} is under way")
        return described

    answer = call(f"DeleteCluster {name}", lambda: service.delete_cluster(**request), existing=existing)
    return str(answer["ClusterArn"])


def wait(
    name: str, region: str | None, timeout_s: float | None, hint: str, *, busy: Collection[str] | None = None
) -> Iterator[str]:
    """Wait for a cluster, and yield each new status of the cluster.

    Args:
        timeout_s: maximum seconds to wait. None: no limit.
        hint: hint for the error after the timeout.
        busy: statuses during which the wait continues. None: wait until the cluster is deleted.

    Raises:
        WaitTimeoutError: the wait has taken longer than `timeout_s` seconds.
        HyperpodExtError: the cluster has failed.
        NotFoundError: the cluster does not exist, and `busy` is not None.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    shown = ""
    while True:
        try:
            described = describe(name, region)
        except NotFoundError:
            if busy is None:
                return
            raise
        status = str(described["ClusterStatus"])
        if status != shown:
            yield status
            shown = status
        if status == "Failed":
            raise HyperpodExtError(f"{name}: {described.get('FailureMessage') or 'AWS reports no reason'}")
        if busy is not None and status not in busy:
            return
        if deadline is not None and time.monotonic() > deadline:
            raise WaitTimeoutError(f"{name} is still {status} after {timeout_s:g} s", hint=hint)
        time.sleep(_ASK_EVERY_S)


def _pages(operation: str, member: str, region: str | None, query: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    service = client("sagemaker", region)
    name = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in operation).lstrip("_")
    ask, asked = getattr(service, name), dict(query)
    while True:
        page = call(operation, lambda: ask(**asked))
        yield from page.get(member) or []
        if not page.get("NextToken"):
            return
        asked["NextToken"] = page["NextToken"]


def _iso_time(at: datetime | None) -> str | None:
    return at.astimezone(UTC).isoformat(timespec="seconds") if at else None
