"""Checks that the cluster's AWS region has its instance types, keys, file systems and training plans."""

from __future__ import annotations

from collections.abc import Iterator

from hyperpod_ext.catalog.regions import known_regions, offered, regions_of, regions_with
from hyperpod_ext.clusters.checks import check, groups_of, named_types
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.clusters.cluster_parts import Storage
from hyperpod_ext.errors import Problem

_PARTITIONS = {"us-gov-": "AWS GovCloud (US)", "cn-": "AWS China", "us-iso": "AWS's isolated regions"}
"""Names of AWS partitions, by the prefix of their regions."""


@check(
    "HPX222",
    "error",
    "a partition of AWS without HyperPod",
    "CloudFormation's schemas and AWS's price lists had no HyperPod clusters in any region of this partition on the "
    "date in `catalog/cluster_regions.json`.",
    "Choose another region. If AWS has added the region, use --ignore HPX222.",
)
def region_has_clusters(cluster: ClusterConfig) -> Iterator[Problem]:
    known = known_regions() | {*regions_of("cluster")}
    for start, name in _PARTITIONS.items():
        if cluster.region.startswith(start) and cluster.region not in known:
            hint = f"regions with HyperPod clusters: {', '.join(regions_of('cluster'))}"
            yield Problem(f"{name} has no HyperPod clusters", path="region", hint=hint)


@check(
    "HPX201",
    "error",
    "machines that are not available in the region",
    "No zone of the region has machines of this type. The cluster would wait for capacity, and fail. Source: AWS's "
    "price lists, on the date in `catalog/cluster_regions.json`.",
    "Choose another type or another region. If AWS has added the type, use --ignore HPX201.",
)
def types_are_offered(cluster: ClusterConfig) -> Iterator[Problem]:
    if cluster.region not in known_regions():
        return  # skip a region whose instance types are not in the catalog
    for path, name in named_types(cluster):
        elsewhere = ", ".join(regions_with(name))  # no regions if the catalog lacks the instance type
        if elsewhere and name not in offered(cluster.region):
            message = f"{name} is not offered in {cluster.region}"
            yield Problem(message, path=path, hint=f"regions with this type: {elsewhere}")


@check(
    "HPX202",
    "error",
    "a resource of another region",
    "A cluster can only use keys, file systems, training plans, secrets and EKS clusters of its own region. AWS starts "
    "and charges for machines that cannot read the key or mount the file system, and then gives up on them.",
    "Use a resource in the cluster's region, or change region.",
)
def all_is_in_one_region(cluster: ClusterConfig) -> Iterator[Problem]:
    for path, what, text in _named(cluster):
        region = _region_of(text)
        if region not in ("", cluster.region):
            message = f"{what} is in {region}, but the cluster is in {cluster.region}"
            yield Problem(message, path=path, hint=f"use one in {cluster.region}")


def _named(cluster: ClusterConfig) -> Iterator[tuple[str, str, str]]:
    """Yield each resource in the spec that has a region: the path of its field, a description, and its ARN or DNS
    name."""
    if cluster.eks_cluster_arn is not None:
        yield "eks_cluster_arn", "the EKS cluster", cluster.eks_cluster_arn
    if cluster.slurm is not None and cluster.slurm.accounting is not None:
        yield "slurm.accounting.secret_arn", "the secret", cluster.slurm.accounting.secret_arn
    for path, group in groups_of(cluster):
        if group.training_plan is not None:
            yield f"{path}.training_plan", "the training plan", group.training_plan
        for index, storage in enumerate(group.storage):
            yield from _of_storage(storage, f"{path}.storage.{index}")
    made = cluster.infrastructure
    for field in ("checkpoints", "data", "lifecycle"):
        bucket = getattr(made.buckets, field) if made is not None else None
        if bucket is not None and bucket.kms_key is not None:
            yield f"infrastructure.buckets.{field}.kms_key", "the key", bucket.kms_key
    if made is not None and made.add_ons.observability is not None and made.add_ons.observability.workspace_arn:
        where = "infrastructure.add_ons.observability.workspace_arn"
        yield where, "the workspace", made.add_ons.observability.workspace_arn


def _of_storage(storage: Storage, path: str) -> Iterator[tuple[str, str, str]]:
    if storage.kind == "ebs":
        if storage.kms_key is not None:
            yield f"{path}.kms_key", "the key", storage.kms_key
    else:
        yield f"{path}.dns_name", "the file system", storage.dns_name


def _region_of(text: str) -> str:
    """Return the AWS region in an ARN, or in a DNS name such as `fs-0123.fsx.us-west-2.amazonaws.com`. Empty if `text`
    contains no region."""
    if text.startswith("arn:"):
        return text.split(":")[3]
    parts = text.split(".")
    return parts[2] if len(parts) > 3 and parts[1] == "fsx" else ""
