"""Creates and updates HyperPod clusters with SageMaker's API."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hyperpod_ext.clusters import existing
from hyperpod_ext.clusters.changes import RequestChange, find_changes
from hyperpod_ext.clusters.checks import findings
from hyperpod_ext.clusters.request import Request, create_cluster_request
from hyperpod_ext.clusters.rules import problems
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    UnsupportedError,
)
from hyperpod_ext.jobs.sagemaker.client import call, client
from hyperpod_ext.jobs.sagemaker.strict import check_request

_MOVING = frozenset({"Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting"})


def checked_create_request(cluster: ClusterConfig, ignore: Collection[str] = ()) -> Request:
    """Return the CreateCluster request for `cluster`, after all checks that need no network. Checks in `ignore` are
    skipped.

    Raises:
        UnsupportedError: fields of the spec do not fit together.
        ConfigError: the request is not valid in AWS's API model.
    """
    if found := [*problems(cluster), *findings(cluster, "error", ignore)]:
        raise UnsupportedError(found)
    return checked("CreateCluster", create_cluster_request(cluster))


def checked(operation: str, request: Request) -> Request:
    """Return `request`, after a check of the request against AWS's API model.

    Raises:
        ConfigError: the request is not valid in AWS's API model.
    """
    if found := check_request(operation, request):
        raise ConfigError(found)
    return request


def create(cluster: ClusterConfig, request: Request) -> str:
    """Send the CreateCluster request, and return the ARN of the new cluster.

    Raises:
        ConflictError: a cluster with this name exists, and this call did not create it.
        UnknownOutcomeError: the response was lost, and it is unknown whether the cluster exists.
    """
    service = client("sagemaker", cluster.region)
    doing = f"CreateCluster {cluster.name}"
    try:
        answer = call(doing, lambda: service.create_cluster(**request), existing=lambda: _as_asked(cluster))
    except ConflictError as error:
        hint = f"`hp-ext cluster describe {cluster.name}` shows it, `hp-ext cluster update` changes it"
        raise ConflictError(error.message, hint=f"{hint}; or use another name") from None
    return str(answer["ClusterArn"])


def _as_asked(cluster: ClusterConfig) -> Mapping[str, Any]:
    """Return the response of DescribeCluster if the existing cluster is equal to the spec `cluster`. Members that
    DescribeCluster omits are not compared.

    Raises:
        ConflictError: the existing cluster differs from the spec.
    """
    described, found = changes(cluster)
    if (status := described["ClusterStatus"]) not in ("Creating", "InService"):
        raise ConflictError(
            f"a cluster {cluster.name} exists, with status {status}",
            hint="choose another name; or delete the cluster with `hp-ext cluster delete`, and create it again",
        )
    if other := [str(one) for one in found if one.before not in (None, {}, []) or one.effect in ("add", "tag")]:
        raise ConflictError(
            f"a cluster {cluster.name} exists and differs from the spec: {'; '.join(other)}",
            hint="change it with `hp-ext update-cluster`, or choose another name",
        )
    return described


def _updated(cluster: ClusterConfig, sent: Collection[str]) -> Mapping[str, Any]:
    """Return the response of DescribeCluster, if AWS has made all changes in `sent`.

    Args:
        sent: paths of the changes that an UpdateCluster request contained.

    Raises:
        NotFoundError: AWS has not made one of the changes.
    """
    described, left = changes(cluster)
    if paths := sorted({one.path for one in left} & set(sent)):
        raise NotFoundError(f"cluster {cluster.name} does not have the requested values of {', '.join(paths)}")
    return described


def changes(cluster: ClusterConfig) -> tuple[Mapping[str, Any], list[RequestChange]]:
    """Return the response of DescribeCluster, and the differences between the existing cluster and the spec."""
    service, described = client("sagemaker", cluster.region), existing.describe(cluster.name, cluster.region)
    arn, tags = described["ClusterArn"], {}
    if cluster.tags:  # read the existing tags only if the spec has tags to compare with
        answer = call(f"ListTags {cluster.name}", lambda: service.list_tags(ResourceArn=arn))
        tags = {tag["Key"]: tag["Value"] for tag in answer["Tags"]}
    return described, find_changes(cluster, described, tags)


def update(cluster: ClusterConfig, request: Request | None, arn: str, made: list[RequestChange]) -> None:
    """Send the UpdateCluster request if there is one, and then set changed tags.

    Args:
        made: all changes of the update, including changes of tags.
    """
    service = client("sagemaker", cluster.region)
    if request is not None:
        doing, sent = f"UpdateCluster {cluster.name}", {one.path for one in made if one.effect != "tag"}
        call(doing, lambda: service.update_cluster(**request), existing=lambda: _updated(cluster, sent))
    tags = [{"Key": change.path.partition(".")[2], "Value": change.after} for change in made if change.effect == "tag"]
    if tags:
        call(f"AddTags {cluster.name}", lambda: service.add_tags(ResourceArn=arn, Tags=tags))


def wait(cluster: ClusterConfig, timeout_s: float | None) -> Iterator[str]:
    """Wait until AWS has finished the creation or the update of a cluster, and yield each new status of the cluster.

    Raises:
        WaitTimeoutError: AWS has not finished within `timeout_s` seconds.
        HyperpodExtError: the cluster has failed.
    """
    hint = "AWS continues; run the command again with --wait"
    return existing.wait(cluster.name, cluster.region, timeout_s, hint, busy=_MOVING)
