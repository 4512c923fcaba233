"""Where the API and CloudFormation differ today. A release that changes that makes these tests fail: then the rules in
`clusters/deployment.py`, and the facts in `catalog/cluster_regions.json`, want another look."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import cfnlint
import pytest

from hyperpod_ext.catalog import regions
from hyperpod_ext.jobs.sagemaker.strict import _service_model

SCHEMAS = Path(cfnlint.__file__).parent / "data" / "schemas"
Path_ = tuple[str, ...]

ONLY_IN_THE_API = {
    "InstanceGroups.AutoPatchConfig.DrainPolicy",
    "InstanceGroups.AutoPatchConfig.IdleWaitWindowInSeconds",
    "RestrictedInstanceGroups.ScheduledUpdateConfig",
}
"""`deployment._only_in_the_api` refuses these, and these values:"""
VALUES_ONLY_IN_THE_API = {
    ("InstanceGroups.AutoPatchConfig.PatchingStrategy", "DrainFirst"),
    ("InstanceGroups.OnStartDeepHealthChecks", "MultiNodeTrainingValidation"),
    ("RestrictedInstanceGroups.OnStartDeepHealthChecks", "MultiNodeTrainingValidation"),
}
READ_ONLY = {"InstanceGroups.AutoPatchConfig.PatchSchedule.NextPatchDate"}
"""And these: CloudFormation shows them, and takes none."""
CREATE_ONLY = {"ClusterName", "VpcConfig", "Orchestrator.Eks"}


@cache
def schema(kind: str, region: str = "us-west-2") -> dict[str, Any]:
    """CloudFormation's own schema of a type."""
    files = json.loads((SCHEMAS / "providers" / f"{region}.json").read_text())
    found: dict[str, Any] = json.loads((SCHEMAS / "resources" / f"{files[kind]}.json").read_text())
    return found


def members_of_type(kind: str) -> dict[str, dict[str, Any]]:
    """Every member of the type, lists and alternatives passed through, and its schema."""
    whole = schema(kind)

    def resolved(one: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in one or one.get("type") == "array":
            one = whole["definitions"][one["$ref"].rpartition("/")[2]] if "$ref" in one else one["items"]
        return one

    def walk(one: dict[str, Any], path: Path_) -> Iterator[tuple[Path_, dict[str, Any]]]:
        one = resolved(one)
        for choice in (*one.get("oneOf", ()), *one.get("anyOf", ()), *one.get("allOf", ())):
            yield from walk(choice, path)
        for name, member in one.get("properties", {}).items():
            yield (*path, name), resolved(member)
            yield from walk(member, (*path, name))

    return {".".join(path): member for path, member in walk(whole, ())}


def members_of_api() -> dict[str, Any]:
    """Every member of CreateCluster, lists passed through, and its shape."""

    def walk(shape: Any, path: Path_) -> Iterator[tuple[Path_, Any]]:
        while shape.type_name == "list":
            shape = shape.member
        if shape.type_name == "structure":
            for name, member in shape.members.items():
                inner = member
                while inner.type_name == "list":
                    inner = inner.member
                yield (*path, name), inner
                yield from walk(member, (*path, name))

    shape = _service_model().operation_model("CreateCluster").input_shape
    return {".".join(path): member for path, member in walk(shape, ())}


def test_what_cloudformation_lacks_is_what_is_refused() -> None:
    missing = members_of_api().keys() - members_of_type("AWS::SageMaker::Cluster").keys()
    assert {name for name in missing if name.rpartition(".")[0] not in missing} == ONLY_IN_THE_API


def test_values_that_cloudformation_lacks_are_refused() -> None:
    there, types = members_of_api(), members_of_type("AWS::SageMaker::Cluster")
    lacking = {
        (name, value)
        for name in there.keys() & types.keys()
        if types[name].get("enum")
        for value in set(getattr(there[name], "enum", ())) - set(types[name]["enum"])
    }
    assert lacking == VALUES_ONLY_IN_THE_API


def named(pointers: list[str]) -> set[str]:
    parts = (pointer.removeprefix("/properties/").split("/") for pointer in pointers)
    return {".".join(part for part in path if part != "*") for path in parts}


def test_what_cloudformation_takes_back_is_what_is_refused() -> None:
    assert named(schema("AWS::SageMaker::Cluster")["readOnlyProperties"]) & members_of_api().keys() == READ_ONLY


def test_what_only_a_new_cluster_can_have() -> None:
    assert named(schema("AWS::SageMaker::Cluster")["createOnlyProperties"]) == CREATE_ONLY


def test_the_catalog_says_what_the_schemas_say() -> None:
    file = SCHEMAS / "extensions" / "aws_sagemaker_cluster" / "instancetype_enum.json"
    offered = {
        region: set(one["enum"]) for region, one in json.loads(file.read_text()).items() if region != "description"
    }
    assert {region: set(regions.offered(region)) for region in regions.known_regions()} == offered


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ("cluster", "AWS::SageMaker::Cluster"),
        ("compute_quota", "AWS::SageMaker::ComputeQuota"),
        ("scheduler_config", "AWS::SageMaker::ClusterSchedulerConfig"),
    ],
)
def test_the_catalog_knows_where_each_type_can_be_made(part: Any, kind: str) -> None:
    files = [
        file for file in (SCHEMAS / "providers").glob("*-*.json") if "-iso" not in file.stem and "isoe" not in file.stem
    ]
    assert {file.stem for file in files if kind in json.loads(file.read_text())} == set(regions.regions_of(part))
