"""What can never change without a new cluster is the same whatever the number of machines."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cdk_app import Templates, synthesise
from deployments import CASES, deployment

pytestmark = pytest.mark.slow  # the CDK starts node, which takes seconds

CREATE_ONLY = ("ClusterName", "VpcConfig", "Orchestrator")


def cluster_of(templates: Templates) -> dict[str, Any]:
    properties: dict[str, Any] = templates["cluster"]["Resources"]["Cluster"]["Properties"]
    return properties


def fixed(templates: Templates) -> dict[str, Any]:
    """The members that only a new cluster can have otherwise."""
    return {name: cluster_of(templates).get(name) for name in CREATE_ONLY}


@pytest.mark.parametrize("case", ["eks", "slurm", "least", "imported"])
def test_scale_changes_the_number_of_machines_and_nothing_else(
    case: str, synthesised: Callable[..., Templates]
) -> None:
    empty, scaled = copy.deepcopy(synthesised(case, scale=False)), copy.deepcopy(synthesised(case, scale=True))
    assert fixed(empty) == fixed(scaled)
    for templates in (empty, scaled):
        for group in cluster_of(templates)["InstanceGroups"]:
            group.pop("InstanceCount")
    assert {part: scaled[part] for part in empty} == empty
    assert scaled.keys() - empty.keys() <= {"addons", "observability"}


def test_machines_zones_and_groups_may_come_without_a_new_cluster(
    synthesised: Callable[..., Templates], tmp_path: Path
) -> None:
    """A zone that is added at the end moves nothing; the group in it has subnets of its own."""
    case = CASES["eks"]
    grown = deployment(
        case,
        instance_groups=[*case["instance_groups"], case["instance_groups"][0] | {"name": "more", "count": 9}],
        infrastructure__network__zones=["usw2-az1", "usw2-az2", "usw2-az3"],
        infrastructure__network__group_zones={"others": "usw2-az2", "more": "usw2-az3"},
    )
    before, after = synthesised("eks"), synthesise(grown, tmp_path)
    assert fixed(before) == fixed(after)
    network, wider = before["network"]["Resources"], after["network"]["Resources"]
    moved = [name for name in network if wider[name] != network[name]]
    assert [name for name in moved if network[name]["Type"] != "AWS::EC2::VPCEndpoint"] == []
    assert cluster_of(after)["InstanceGroups"][:2] == cluster_of(before)["InstanceGroups"]


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "ClusterName": ("eks", {"name": "another"}),
    "VpcConfig": (
        "imported",
        {"vpc": {"subnets": ["subnet-0fedcba9876543210"], "security_groups": ["sg-0123456789abcdef0"]}},
    ),
    "Orchestrator": ("imported", {"eks_cluster_arn": "arn:aws:eks:us-west-2:123456789012:cluster/another"}),
}


@pytest.mark.parametrize("member", CREATE_ONLY)
def test_what_needs_a_new_cluster_shows_in_the_template(
    member: str, synthesised: Callable[..., Templates], tmp_path: Path
) -> None:
    case, change = CHANGES[member]
    after = fixed(synthesise(deployment(CASES[case], **change), tmp_path))
    before = fixed(synthesised(case))
    assert member in [name for name in CREATE_ONLY if before[name] != after[name]]
