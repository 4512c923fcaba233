"""Creates and updates clusters over the API."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hyperpod_ext.clusters import existing
from hyperpod_ext.clusters.changes import RequestChange, find_changes
from hyperpod_ext.clusters.checks import findings
from hyperpod_ext.clusters.request import Request, create_cluster_request
from hyperpod_ext.clusters.rules import problems
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.errors import ConfigError, HyperpodExtError, UnsupportedError, WaitTimeoutError
from hyperpod_ext.submit.sagemaker.client import call, client
from hyperpod_ext.submit.sagemaker.strict import check_request

_ASK_EVERY_S = 5.0
_MOVING = frozenset({"Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting"})


def checked_create_request(cluster: ClusterConfig, ignore: Collection[str] = ()) -> Request:
    """The CreateCluster request, after every check that needs no network but those in `ignore`.

    Raises:
        UnsupportedError: fields that are right one by one cannot be together.
        ConfigError: the service's own model refuses the request.
    """
    if found := [*problems(cluster), *findings(cluster, "error", ignore)]:
        raise UnsupportedError(found)
    return checked("CreateCluster", create_cluster_request(cluster))


def checked(operation: str, request: Request) -> Request:
    """`request`, if the service's own model has nothing against it."""
    if found := check_request(operation, request):
        raise ConfigError(found)
    return request


def create(cluster: ClusterConfig, request: Request) -> str:
    """Send the request; returns the cluster's ARN."""
    service = client("sagemaker", cluster.region)
    answer = call(f"CreateCluster {cluster.name}", lambda: service.create_cluster(**request))
    return str(answer["ClusterArn"])


def changes(cluster: ClusterConfig) -> tuple[Mapping[str, Any], list[RequestChange]]:
    """The cluster as it is, and what the config would change."""
    service, described = client("sagemaker", cluster.region), describe(cluster)
    arn = described["ClusterArn"]
    answer = call(f"ListTags {cluster.name}", lambda: service.list_tags(ResourceArn=arn))
    tags = {tag["Key"]: tag["Value"] for tag in answer["Tags"]}
    return described, find_changes(cluster, described, tags)


def update(cluster: ClusterConfig, request: Request | None, arn: str, made: list[RequestChange]) -> None:
    """Send what UpdateCluster does, and the tags."""
    service = client("sagemaker", cluster.region)
    if request is not None:
        call(f"UpdateCluster {cluster.name}", lambda: service.update_cluster(**request))
    tags = [{"Key": change.path.partition(".")[2], "Value": change.after} for change in made if change.effect == "tag"]
    if tags:
        call(f"AddTags {cluster.name}", lambda: service.add_tags(ResourceArn=arn, Tags=tags))


def describe(cluster: ClusterConfig) -> Mapping[str, Any]:
    """The answer of DescribeCluster."""
    return existing.describe(cluster.name, cluster.region)


def wait(cluster: ClusterConfig, timeout_s: float | None) -> Iterator[str]:
    """Each status that the cluster comes to, until it rests.

    Raises:
        WaitTimeoutError: it is still moving.
        HyperpodExtError: it has failed.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    shown = ""
    while True:
        described = describe(cluster)
        status = str(described["ClusterStatus"])
        if status != shown:
            yield status
            shown = status
        if status == "Failed":
            raise HyperpodExtError(f"{cluster.name}: {described.get('FailureMessage', 'it does not say why')}")
        if status not in _MOVING:
            return
        if deadline is not None and time.monotonic() > deadline:
            hint = "it goes on; the command may be given again with --wait"
            raise WaitTimeoutError(f"{cluster.name} is still {status} after {timeout_s:g} s", hint=hint)
        time.sleep(_ASK_EVERY_S)
