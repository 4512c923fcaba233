"""Instance types and CloudFormation types that HyperPod supports in each AWS region."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hyperpod_ext.catalog import facts

_FILE = "cluster_regions.json"

ClusterFeature = Literal["cluster", "compute_quota", "scheduler_config"]


def known_regions() -> frozenset[str]:
    """Return the AWS regions for which the catalog knows the instance types of HyperPod clusters."""
    return frozenset(facts(_FILE)["instance_types"])


def offered(region: str) -> frozenset[str]:
    """Return the instance types that HyperPod clusters can have in `region`; empty for an unknown region."""
    return frozenset(facts(_FILE)["instance_types"].get(region, ()))


def regions_with(instance_type: str) -> Sequence[str]:
    """Return the regions in which HyperPod clusters can have machines of the type `instance_type`."""
    return [region for region, types in facts(_FILE)["instance_types"].items() if instance_type in types]


def regions_of(part: ClusterFeature) -> Sequence[str]:
    """Return the regions in which CloudFormation can create the HyperPod resource `part`."""
    return list(facts(_FILE)[part])


def kubernetes_versions() -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the oldest and the newest version of Kubernetes that HyperPod supports, each as a tuple like (1, 28)."""
    found = facts(_FILE)["kubernetes"]
    return _version(found["oldest"]), _version(found["newest"])


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)
