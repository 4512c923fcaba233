"""Reads facts about an AWS account for the checks of a cluster. No function of the module changes the account."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hyperpod_ext.config.clusters.account import AccountFacts, PlanFacts, QuotaFacts, SubnetFacts
from hyperpod_ext.config.clusters.cluster import ClusterConfig, InstanceGroup
from hyperpod_ext.config.clusters.cluster_parts import RestrictedGroup
from hyperpod_ext.errors import HyperpodExtError
from hyperpod_ext.jobs.sagemaker.client import call, client

Group = InstanceGroup | RestrictedGroup


def with_account(cluster: ClusterConfig) -> tuple[ClusterConfig, list[str]]:
    """Fill the section `account` of a cluster's spec with facts that are read from AWS.

    Returns:
        The cluster with the section `account`, and one sentence for each field of the section that could not be read. A
        field that AWS did not return keeps its value in the spec.
    """
    stated = cluster.account or AccountFacts()
    found: dict[str, Any] = {}
    unread: list[str] = []
    for field, read in _READERS.items():
        try:
            found[field] = read(cluster)
        except HyperpodExtError as error:
            unread.append(f"account.{field} is not checked: {error.message}")
    found = {field: value for field, value in found.items() if value is not None}
    return cluster.model_copy(update={"account": stated.model_copy(update=found)}), unread


def _subnets(cluster: ClusterConfig) -> dict[str, SubnetFacts] | None:
    networks = [network for network in (cluster.vpc, *(group.vpc for group in _groups(cluster))) if network is not None]
    names = sorted({subnet for network in networks for subnet in network.subnets})
    return _describe_subnets(cluster, names) if names else None


def _describe_subnets(cluster: ClusterConfig, names: list[str]) -> dict[str, SubnetFacts]:
    ec2 = client("ec2", cluster.region)
    answer = call("DescribeSubnets", lambda: ec2.describe_subnets(SubnetIds=names))
    return {
        one["SubnetId"]: SubnetFacts.model_construct(
            zone=one["AvailabilityZoneId"], free_addresses=one["AvailableIpAddressCount"]
        )
        for one in answer["Subnets"]
    }


def _training_plans(cluster: ClusterConfig) -> dict[str, PlanFacts] | None:
    sagemaker = client("sagemaker", cluster.region)
    found = {}
    for plan in sorted({group.training_plan for group in _groups(cluster) if group.training_plan}):
        name = plan.rpartition("/")[2]
        ask = partial(sagemaker.describe_training_plan, TrainingPlanName=name)
        answer = call(f"DescribeTrainingPlan {name}", ask)
        held = answer.get("ReservedCapacitySummaries", [])
        types, zones = {one["InstanceType"] for one in held}, {one.get("AvailabilityZoneId") for one in held}
        if len(types) == 1:
            zone = zones.pop() if len(zones) == 1 else None
            count = answer.get("TotalInstanceCount")
            found[plan] = PlanFacts.model_construct(instance_type=types.pop(), zone=zone, count=count)
    return found or None


def _file_systems(cluster: ClusterConfig) -> dict[str, str] | None:
    disks = [storage for group in _groups(cluster) for storage in group.storage]
    names = sorted({disk.dns_name.split(".")[0] for disk in disks if disk.kind != "ebs"})
    if not names:
        return None
    fsx = client("fsx", cluster.region)
    answer = call("DescribeFileSystems", lambda: fsx.describe_file_systems(FileSystemIds=names))
    near = {one["FileSystemId"]: one["SubnetIds"][0] for one in answer["FileSystems"] if one.get("SubnetIds")}
    zones = _describe_subnets(cluster, sorted(set(near.values()))) if near else {}
    return {name: zones[subnet].zone for name, subnet in near.items()}


def _quotas(cluster: ClusterConfig) -> dict[str, QuotaFacts]:
    quotas = client("service-quotas", cluster.region)
    names = {f"{group.instance_type} for cluster usage": group.instance_type for group in _groups(cluster)}
    pages = quotas.get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker")
    listed = call("ListServiceQuotas sagemaker", lambda: [one for page in pages for one in page["Quotas"]])
    return {
        names[one["QuotaName"]]: QuotaFacts.model_construct(machines=int(one["Value"]), code=one["QuotaCode"])
        for one in listed
        if one["QuotaName"] in names
    }


def _eks_version(cluster: ClusterConfig) -> str | None:
    if cluster.eks_cluster_arn is None:
        return None
    eks, name = client("eks", cluster.region), cluster.eks_cluster_arn.rpartition("/")[2]
    return str(call(f"DescribeCluster {name}", lambda: eks.describe_cluster(name=name))["cluster"]["version"])


def _lifecycle_files(cluster: ClusterConfig) -> tuple[str, ...] | None:
    folders = sorted({group.lifecycle.source for group in cluster.instance_groups if group.lifecycle})
    if not folders:
        return None
    pages = client("s3", cluster.region).get_paginator("list_objects_v2")
    found: list[str] = []
    for folder in folders:
        bucket, _, prefix = folder.removeprefix("s3://").partition("/")
        found += call(f"ListObjectsV2 {bucket}", partial(_keys, pages, bucket, prefix))
    return tuple(found)


def _keys(pages: Any, bucket: str, prefix: str) -> list[str]:
    listed = pages.paginate(Bucket=bucket, Prefix=prefix)
    return [f"s3://{bucket}/{one['Key']}" for page in listed for one in page.get("Contents", [])]


def _groups(cluster: ClusterConfig) -> Iterator[Group]:
    yield from cluster.instance_groups
    yield from cluster.restricted_groups


_READERS: dict[str, Callable[[ClusterConfig], Any]] = {
    "subnets": _subnets,
    "training_plans": _training_plans,
    "file_systems": _file_systems,
    "quotas": _quotas,
    "eks_version": _eks_version,
    "lifecycle_files": _lifecycle_files,
}
"""Functions that read a field of AccountFacts from AWS, by the name of the field."""
