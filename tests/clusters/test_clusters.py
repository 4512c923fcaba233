"""CreateCluster and UpdateCluster: every member, every rule, and what an update would change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aws_stand_in import as_described
from clusters import CASES, EKS, GROUP, LEAST, PLAN, SLURM, VPC, cluster, with_group
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpod_ext.clusters.changes import find_changes, update_cluster_request
from hyperpod_ext.clusters.request import create_cluster_request
from hyperpod_ext.clusters.rules import problems
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.files.load import load
from hyperpod_ext.jobs.sagemaker.strict import _service_model, check_request

Path_ = tuple[str, ...]


def members_of(operation: str) -> set[Path_]:
    """Every member of a request, lists and maps passed through."""
    return set(_members(_service_model().operation_model(operation).input_shape, ()))


def _members(shape: Any, path: Path_) -> Iterator[Path_]:
    if shape.type_name == "list":
        yield from _members(shape.member, path)
    if shape.type_name == "structure":
        for name, member in shape.members.items():
            yield (*path, name)
            yield from _members(member, (*path, name))


def members_in(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    if isinstance(value, list):
        for item in value:
            yield from members_in(item, path)
    if isinstance(value, dict):
        for name, item in value.items():
            yield (*path, name)
            yield from members_in(item, (*path, name))


@pytest.mark.parametrize("name", CASES)
def test_every_cluster_passes_rules_and_the_strict_check(name: str) -> None:
    wanted = cluster(CASES[name])
    assert list(problems(wanted)) == []
    assert check_request("CreateCluster", create_cluster_request(wanted)) == []


def test_every_member_of_create_cluster_is_used_by_some_cluster_here() -> None:
    used = {path for case in CASES.values() for path in members_in(create_cluster_request(cluster(case)))}
    labels = {path for path in used if "Labels" in path[:-1]}  # keys of a map, not members
    assert sorted(used - labels) == sorted(members_of("CreateCluster"))


def test_every_member_of_update_cluster_can_be_sent() -> None:
    nothing = {"ClusterArn": "x", "InstanceGroups": [{"InstanceGroupName": "old", "TargetCount": 1}]}
    used: set[Path_] = set()
    for case in CASES.values():
        wanted = cluster(case)
        request = update_cluster_request(wanted, find_changes(wanted, nothing, {}))
        assert request is not None
        assert check_request("UpdateCluster", request) == []
        used |= {path for path in members_in(request) if "Labels" not in path[:-1]}
    eks = {("Orchestrator", "Eks"), ("Orchestrator", "Eks", "ClusterArn")}
    assert members_of("UpdateCluster") - used <= eks  # a cluster keeps the EKS cluster that it is part of


@pytest.mark.parametrize("name", CASES)
def test_a_cluster_that_is_as_its_spec_says_has_no_changes(name: str) -> None:
    wanted = cluster(CASES[name])
    described = as_described(create_cluster_request(wanted))
    assert find_changes(wanted, described, dict(wanted.tags)) == []
    assert update_cluster_request(wanted, []) is None


def changed(to: ClusterConfig, base: dict[str, Any] = LEAST) -> dict[str, str]:
    """Path and effect of each change from `base`."""
    was = cluster(base)
    found = find_changes(to, as_described(create_cluster_request(was)), dict(was.tags))
    return {change.path: change.effect for change in found}


def test_what_changes_is_told_with_what_it_takes() -> None:
    workers = "InstanceGroups.workers"
    assert changed(with_group(count=6)) == {f"{workers}.InstanceCount": "update"}
    assert changed(with_group(instance_type="ml.p5e.48xlarge")) == {f"{workers}.InstanceType": "replace group"}
    assert changed(with_group(name="others")) == {"InstanceGroups.others": "add", workers: "delete group"}
    assert changed(cluster(node_recovery="None")) == {"NodeRecovery": "update"}
    assert changed(cluster(vpc=VPC | {"subnets": ["subnet-9"]})) == {"VpcConfig": "replace cluster"}
    other = "arn:aws:eks:us-west-2:123456789012:cluster/other"
    assert changed(cluster(eks_cluster_arn=other)) == {"Orchestrator.Eks": "replace cluster"}
    assert changed(cluster(tags={"a": "b"})) == {"Tags.a": "tag"}
    slurm = SLURM["slurm"] | {"strategy": "Managed"}
    assert changed(cluster(SLURM, slurm=slurm), SLURM) == {"Orchestrator.Slurm": "update"}
    groups = [GROUP | {"labels": {"team": "b"}}]
    assert changed(cluster(instance_groups=groups)) == {f"{workers}.KubernetesConfig": "update"}


OF_A_NEW_GROUP: dict[str, dict[str, Any]] = {
    "InstanceRequirements": {"other_types": ["ml.p5e.48xlarge"]},
    "ThreadsPerCore": {"threads_per_core": 2},
    "TrainingPlanArn": {"training_plan": PLAN},
    "OverrideVpcConfig": {"vpc": VPC},
    "CapacityRequirements": {"capacity": "spot"},
    "NetworkInterface": {"network_interface": "efa"},
}


@pytest.mark.parametrize("member", OF_A_NEW_GROUP)
def test_what_only_a_new_group_can_have_is_told_so(member: str) -> None:
    assert changed(with_group(**OF_A_NEW_GROUP[member])) == {f"InstanceGroups.workers.{member}": "replace group"}


def test_what_a_spec_leaves_open_is_no_change() -> None:
    assert not {path: e for path, e in changed(cluster(), EKS).items() if path.startswith("TieredStorageConfig")}


def test_the_order_of_subnets_and_of_checks_is_no_change() -> None:
    turned = VPC | {"subnets": VPC["subnets"][::-1]}
    assert changed(cluster(vpc=turned)) == {}


def test_an_update_sends_only_what_changes_and_groups_whole() -> None:
    was, wanted = cluster(SLURM), json.loads(json.dumps(SLURM))
    wanted["instance_groups"][1]["count"] = 8
    to = cluster(wanted)
    found = find_changes(to, as_described(create_cluster_request(was)), {})
    request = update_cluster_request(to, found)
    assert request == {"ClusterName": "research", "InstanceGroups": [create_cluster_request(to)["InstanceGroups"][1]]}


ROOT = {"kind": "ebs", "root": True, "kms_key": "alias/disk"}
DRAINED = {"strategy": "DrainFirst", "rollout": {"batch": {"nodes": 1}}}
WRONG: dict[str, tuple[str, ClusterConfig]] = {
    "no EKS": ("eks_cluster_arn", cluster(eks_cluster_arn=None)),
    "no network": ("vpc", cluster(vpc=None)),
    "Slurm on EKS": ("slurm", cluster(slurm={})),
    "a Slurm part on EKS": ("instance_groups.0.slurm", with_group(slurm={"node_type": "Compute"})),
    "EKS on Slurm": ("eks_cluster_arn", cluster(SLURM, eks_cluster_arn=LEAST["eks_cluster_arn"])),
    "a tier on Slurm": ("tiered_storage", cluster(SLURM, tiered_storage={})),
    "Karpenter on Slurm": ("auto_scaling", cluster(SLURM, auto_scaling={})),
    "restricted on Slurm": ("restricted_groups", cluster(SLURM, restricted_groups=EKS["restricted_groups"])),
    "labels on Slurm": ("instance_groups.0.labels", cluster(SLURM, instance_groups=[GROUP | {"labels": {"a": "b"}}])),
    "taints on Slurm": (
        "instance_groups.0.taints",
        cluster(SLURM, instance_groups=[GROUP | {"taints": [{"key": "a"}]}]),
    ),
    "some parts": ("instance_groups.1.slurm", cluster(SLURM, instance_groups=[SLURM["instance_groups"][0], GROUP])),
    "no controller": ("instance_groups", cluster(SLURM, instance_groups=SLURM["instance_groups"][1:])),
    "two groups that are controllers": (
        "instance_groups.1.slurm.node_type",
        cluster(SLURM, instance_groups=[SLURM["instance_groups"][0] | {"name": name} for name in ("a", "b")]),
    ),
    "two controllers": (
        "instance_groups.0.count",
        cluster(SLURM, instance_groups=[SLURM["instance_groups"][0] | {"count": 2}, SLURM["instance_groups"][1]]),
    ),
    "a controller's partition": (
        "instance_groups.0.slurm.partition",
        cluster(SLURM, instance_groups=[GROUP | {"count": 1, "slurm": {"node_type": "Controller", "partition": "a"}}]),
    ),
    "Karpenter without a role": ("cluster_role", cluster(auto_scaling={}, continuous_provisioning=True)),
    "Karpenter all at once": (
        "continuous_provisioning",
        cluster(auto_scaling={}, cluster_role=LEAST["execution_role"]),
    ),
    "a share of nothing": (
        "tiered_storage.memory_percent",
        cluster(tiered_storage={"enabled": False, "memory_percent": 20}),
    ),
    "an environment of nothing": ("restricted_environment", cluster(restricted_environment={})),
    "no role": ("instance_groups.0.execution_role", cluster(execution_role=None)),
    "no restricted role": (
        "restricted_groups.0.execution_role",
        cluster(execution_role=None, restricted_groups=EKS["restricted_groups"]),
    ),
    "a name twice": (
        "restricted_groups.0.name",
        cluster(restricted_groups=[GROUP]),
    ),
    "fewer than least": (
        "instance_groups.0.min_count",
        cluster(instance_groups=[GROUP | {"min_count": 5}], continuous_provisioning=True),
    ),
    "least all at once": ("instance_groups.0.min_count", with_group(min_count=1)),
    "a spot plan": ("instance_groups.0.capacity", with_group(capacity="spot", training_plan=PLAN)),
    "a plan of two types": (
        "instance_groups.0.other_types",
        with_group(other_types=["ml.p5e.48xlarge"], training_plan=PLAN),
    ),
    "a type twice": ("instance_groups.0.other_types", with_group(other_types=["ml.p5.48xlarge"])),
    "two roots": ("instance_groups.0.storage", with_group(storage=[ROOT] * 2)),
    "two further disks": ("instance_groups.0.storage", with_group(storage=[{"kind": "ebs", "size_gib": 500}] * 2)),
    "a root disk with a size": (
        "instance_groups.0.storage.0.size_gib",
        with_group(storage=[ROOT | {"size_gib": 100}]),
    ),
    "a root disk without a key": (
        "instance_groups.0.storage.0.kms_key",
        with_group(storage=[{"kind": "ebs", "root": True}]),
    ),
    "a further disk without a size": (
        "instance_groups.0.storage.1.size_gib",
        with_group(storage=[ROOT, {"kind": "ebs"}]),
    ),
    "a restricted group's disk without a size": (
        "restricted_groups.0.storage.0.size_gib",
        cluster(restricted_groups=[GROUP | {"name": "closed", "storage": [{"kind": "ebs"}]}]),
    ),
    "a drain of idle nodes": (
        "instance_groups.0.auto_patch.drain_timeout_s",
        with_group(auto_patch={"strategy": "WhenIdle", "drain_timeout_s": 600}),
    ),
    "an end of no drain": (
        "instance_groups.0.auto_patch.on_drain_timeout",
        with_group(auto_patch={"strategy": "WhenAllIdle", "on_drain_timeout": "Skip"}),
    ),
    "all nodes drained at once": (
        "instance_groups.0.auto_patch.rollout",
        with_group(auto_patch={"strategy": "DrainFirst"}),
    ),
    "nodes drained without a number": (
        "instance_groups.0.auto_patch.rollout.batch",
        with_group(auto_patch={"strategy": "DrainFirst", "rollout": {"wait_s": 60}}),
    ),
    "drained Slurm": (
        "instance_groups.0.auto_patch.strategy",
        cluster(SLURM, instance_groups=[GROUP | {"auto_patch": DRAINED}]),
    ),
    "back without there": (
        "instance_groups.0.scheduled_update.rollout.batch",
        with_group(scheduled_update={"schedule": "cron(0 3 ? * SUN *)", "rollout": {"rollback_batch": {"nodes": 1}}}),
    ),
    "accounting all at once": ("continuous_provisioning", cluster(SLURM, continuous_provisioning=False)),
    "a check twice": ("instance_groups.0.deep_health_checks", with_group(deep_health_checks=["InstanceStress"] * 2)),
    "no script": (
        "instance_groups.0.lifecycle",
        with_group(lifecycle={"source": "s3://bucket/a", "on_create": None}),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_told_with_its_field(name: str) -> None:
    path, wrong = WRONG[name]
    found = list(problems(wrong))
    assert path in [problem.path for problem in found]
    assert all(problem.hint for problem in found)


def test_the_example_is_a_cluster_that_can_be_created(golden: Callable[[Path, str], None], root: Path) -> None:
    example = root / "examples" / "08-cluster"
    wanted = load(ClusterConfig, example / "cluster.yaml")
    assert list(problems(wanted)) == []
    request = create_cluster_request(wanted)
    assert check_request("CreateCluster", request) == []
    golden(example / "rendered" / "create_cluster.json", json.dumps(request, indent=2) + "\n")


@settings(max_examples=300, deadline=None)
@given(
    count=st.integers(0, 100),
    threads=st.none() | st.integers(1, 2),
    recovery=st.sampled_from(["Automatic", "None"]),
    labels=st.dictionaries(st.from_regex(r"\A[a-z]{1,8}\Z"), st.from_regex(r"\A[a-z0-9]{1,8}\Z"), max_size=3),
    percent=st.none() | st.integers(0, 100),
    size=st.integers(1, 16384),
)
def test_any_two_clusters_differ_in_nothing_once_the_changes_are_made(
    count: int, threads: int | None, recovery: str, labels: dict[str, str], percent: int | None, size: int
) -> None:
    group = GROUP | {"count": count, "threads_per_core": threads, "labels": labels}
    group |= {"storage": [{"kind": "ebs", "size_gib": size}]}
    tiered = None if percent is None else {"memory_percent": percent}
    to = cluster(instance_groups=[group], node_recovery=recovery, tiered_storage=tiered)
    assert check_request("CreateCluster", create_cluster_request(to)) == []
    described = as_described(create_cluster_request(cluster()))
    request = update_cluster_request(to, find_changes(to, described, {}))
    if request is not None:
        described |= as_described({name: value for name, value in request.items() if name != "ClusterName"})
    left = find_changes(to, described, {})
    assert [change for change in left if change.effect != "replace group"] == []
