"""What `hp-ext cluster` tells of the real stacks: which changes replace something, and what has a price."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cdk_app import Templates, synthesise
from deployments import CASES, EKS, deployment

from hyperpod_ext.catalog.create_only import create_only
from hyperpod_ext.clusters.cdk.assembly import Assembly, Stack, resources_of
from hyperpod_ext.clusters.cdk.changes import ResourceChange, find_changes
from hyperpod_ext.clusters.cdk.costs import estimate

Synthesised = Callable[..., Templates]


def named(templates: Templates) -> dict[str, Any]:
    return {f"research-{part}": template for part, template in templates.items()}


def changes(there: Templates, folder: Path, **fields: Any) -> list[ResourceChange]:
    """What the EKS case would change with these fields."""
    return find_changes(named(there), named(synthesise(deployment(copy.deepcopy(EKS), **fields), folder)))


def test_scaling_a_cluster_breaks_nothing(synthesised: Synthesised) -> None:
    found = find_changes(named(synthesised("eks", scale=False)), named(synthesised("eks")))
    assert [one for one in found if one.breaks] == []
    (cluster,) = (one for one in found if one.effect == "update" and one.kind == "AWS::SageMaker::Cluster")
    assert {field.path for field in cluster.fields} == {
        "InstanceGroups.workers.InstanceCount",
        "InstanceGroups.others.InstanceCount",
    }


def test_another_group_in_another_zone_breaks_nothing(synthesised: Synthesised, tmp_path: Path) -> None:
    groups = [*EKS["instance_groups"], {"name": "more", "instance_type": "ml.g5.12xlarge", "count": 1}]
    zones = {"usw2-az1": None, "usw2-az2": None, "usw2-az3": None}
    found = changes(
        synthesised("eks"),
        tmp_path,
        instance_groups=groups,
        infrastructure__network__zones=list(zones),
        infrastructure__network__group_zones={"others": "usw2-az2", "more": "usw2-az3"},
    )
    assert found
    assert [(one.id, one.fields) for one in found if one.breaks] == []


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"infrastructure__network__cidr": "10.0.0.0/16"}, "VpcConfig"),
        ({"infrastructure__network__zones": ["usw2-az2", "usw2-az3"]}, "VpcConfig"),
        ({"infrastructure__eks__service_cidr": "10.100.0.0/16"}, "Orchestrator.Eks"),
    ],
)
def test_what_replaces_the_network_or_eks_replaces_the_cluster(
    synthesised: Synthesised, tmp_path: Path, fields: dict[str, Any], path: str
) -> None:
    if "infrastructure__network__zones" in fields:
        fields = fields | {"infrastructure__network__group_zones": {}}
    found = changes(synthesised("eks"), tmp_path, **fields)
    (cluster,) = (one for one in found if one.kind == "AWS::SageMaker::Cluster")
    assert cluster.effect == "replace"
    assert path in {field.path for field in cluster.fields if field.effect == "replace"}


@pytest.mark.parametrize("case", CASES)
def test_every_type_is_known_and_has_a_price_or_none_by_the_hour(synthesised: Synthesised, case: str) -> None:
    templates = synthesised(case)
    stacks = tuple(Stack(f"x-{part}", template) for part, template in templates.items())
    kinds = {one["Type"] for template in templates.values() for one in resources_of(template).values()}
    assert {kind for kind in kinds if create_only(kind) is None} == set()
    found = estimate(deployment(CASES[case]), Assembly(Path(), stacks))
    assert {line.what for line in found.unknown if line.what.startswith("AWS::")} == set()
    assert found.now == found.scaled > 0
