"""What of HyperPod each region has: instance types of clusters, and types of CloudFormation."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

_FILE = Path(__file__).with_name("cluster_regions.json")

ClusterFeature = Literal["cluster", "compute_quota", "scheduler_config"]


@functools.cache
def _facts() -> Any:
    return json.loads(_FILE.read_text())


def known_regions() -> frozenset[str]:
    """Regions whose instance types are known here; of others nothing can be said."""
    return frozenset(_facts()["instance_types"])


def offered(region: str) -> frozenset[str]:
    """Instance types that a cluster in `region` can have; empty for a region that is not known here."""
    return frozenset(_facts()["instance_types"].get(region, ()))


def regions_with(instance_type: str) -> Sequence[str]:
    """Regions in which a cluster can have machines of this type."""
    return [region for region, types in _facts()["instance_types"].items() if instance_type in types]


def regions_of(part: ClusterFeature) -> Sequence[str]:
    """Regions in which CloudFormation can make this."""
    return list(_facts()[part])


def kubernetes_versions() -> tuple[tuple[int, int], tuple[int, int]]:
    """Oldest and newest version of Kubernetes that HyperPod takes, as (1, 28)."""
    found = _facts()["kubernetes"]
    return _version(found["oldest"]), _version(found["newest"])


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)
