"""What cannot be deployed is told before anything is made, with its field and what to write."""

from __future__ import annotations

from typing import Any

import pytest
from clusters import EKS as EVERY_MEMBER
from clusters import GROUP, ROLE, VPC
from deployments import CASES, EKS, IMPORTED, SLURM, deployment
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext.clusters import rules
from hyperpod_ext.clusters.bindings import Bindings, Mount, bound
from hyperpod_ext.clusters.deployment import problems
from hyperpod_ext.clusters.network_rules import zone_prefix
from hyperpod_ext.clusters.request import create_cluster_request
from hyperpod_ext.config.clusters.cluster import ClusterConfig

NETWORK = "infrastructure.network"
GOVERNANCE = "infrastructure__add_ons__task_governance"
TEAM = {"name": "a", "instance_type": "ml.p5.48xlarge", "count": 1}


@pytest.mark.parametrize("name", CASES)
def test_what_can_be_deployed_has_no_problems(name: str) -> None:
    assert list(problems(deployment(CASES[name]))) == []


def changed(base: dict[str, Any] | None = None, **changes: Any) -> ClusterConfig:
    return deployment(base, **changes)


def with_patch(**fields: Any) -> ClusterConfig:
    group = GROUP | {"auto_patch": {"strategy": "WhenIdle"} | fields}
    return deployment(instance_groups=[group])


WRONG: dict[str, tuple[str, ClusterConfig]] = {
    "nothing to make": ("infrastructure", changed(infrastructure=None)),
    "a digit first": ("name", changed(name="1st")),
    "both orchestrators": ("eks_cluster_arn", changed(SLURM, eks_cluster_arn=IMPORTED["eks_cluster_arn"])),
    "Slurm on EKS": ("slurm", changed(slurm={})),
    "EKS on Slurm": ("infrastructure.eks", changed(SLURM, infrastructure__eks__version="1.33")),
    "add-ons on Slurm": ("infrastructure.add_ons", changed(SLURM, infrastructure__add_ons__cert_manager=True)),
    "pods on Slurm": (
        "infrastructure.job_roles",
        changed(SLURM, infrastructure__job_roles=EKS["infrastructure"]["job_roles"]),
    ),
    "services overlap": (
        "infrastructure.eks.service_cidr",
        changed(infrastructure__network__cidr="172.20.0.0/16"),
    ),
    "a connected network overlaps": (
        f"{NETWORK}.connected_cidrs.1",
        changed(infrastructure__network__connected_cidrs=["192.168.0.0/16", "10.192.64.0/18"]),
    ),
    "not a range": (f"{NETWORK}.cidr", changed(infrastructure__network__cidr="10.192.0.1/16")),
    "not addresses": (f"{NETWORK}.cidr", changed(infrastructure__network__cidr="10.292.0.0/16")),
    "too small": (f"{NETWORK}.cidr", changed(infrastructure__network__cidr="10.0.0.0/24")),
    "too large": (f"{NETWORK}.cidr", changed(infrastructure__network__cidr="10.0.0.0/8")),
    "public services": ("infrastructure.eks.service_cidr", changed(infrastructure__eks__service_cidr="8.8.0.0/16")),
    "nobody's addresses": (
        "infrastructure.eks.public_access.0",
        changed(infrastructure__eks__public_access=["1.2.3.4/8"]),
    ),
    "one zone": (f"{NETWORK}.zones", changed(infrastructure__network__zones=["usw2-az1"])),
    "no zones": (f"{NETWORK}.zones", changed(infrastructure__network__zones=[])),
    "a zone twice": (f"{NETWORK}.zones", changed(infrastructure__network__zones=["usw2-az1", "usw2-az1"])),
    "ids and names": (f"{NETWORK}.zones", changed(infrastructure__network__zones=["usw2-az1", "us-west-2b"])),
    "another region's zone": (f"{NETWORK}.zones.0", changed(infrastructure__network__zones=["use1-az1", "usw2-az2"])),
    "a key of a new bucket": (
        "infrastructure.buckets.data.kms_key",
        changed(infrastructure__buckets={"data": {"name": "my-data", "kms_key": "alias/a"}}),
    ),
    "no such group": (f"{NETWORK}.group_zones.x", changed(infrastructure__network__group_zones={"x": "usw2-az1"})),
    "no such zone": (
        f"{NETWORK}.group_zones.workers",
        changed(infrastructure__network__group_zones={"workers": "usw2-az3"}),
    ),
    "a group's own subnets": (
        f"{NETWORK}.group_zones.workers",
        changed(instance_groups=[GROUP | {"vpc": VPC}], infrastructure__network__group_zones={"workers": "usw2-az1"}),
    ),
    "two networks": ("vpc", changed(vpc=VPC)),
    "a network of nothing": ("vpc", changed(IMPORTED, vpc=None)),
    "zones of an existing network": (
        f"{NETWORK}.zones",
        changed(IMPORTED, infrastructure__network__zones=["usw2-az1"]),
    ),
    "EKS nowhere": (f"{NETWORK}.control_plane_subnets", changed(IMPORTED, eks_cluster_arn=None)),
    "EKS somewhere": (
        f"{NETWORK}.control_plane_subnets",
        changed(infrastructure__network__control_plane_subnets=["subnet-1", "subnet-2"]),
    ),
    "shut in": (
        f"{NETWORK}.nat",
        changed(infrastructure__network__nat="none", infrastructure__network__private_endpoints=False),
    ),
    "a type of elsewhere": (
        "instance_groups.0.instance_type",
        changed(
            region="eu-west-2",
            infrastructure__network__zones=["euw2-az1", "euw2-az2"],
            instance_groups=[GROUP | {"instance_type": "ml.p6e-gb200.36xlarge"}],
        ),
    ),
    "another type of elsewhere": (
        "instance_groups.0.other_types.0",
        changed(instance_groups=[GROUP | {"other_types": ["ml.p99.48xlarge"]}]),
    ),
    "a region without clusters": ("region", changed(region="eu-central-2")),
    "an old Kubernetes": ("infrastructure.eks.version", changed(infrastructure__eks__version="1.27")),
    "a new Kubernetes": ("infrastructure.eks.version", changed(infrastructure__eks__version="1.36")),
    "governance of the past": (
        "infrastructure.eks.version",
        changed(infrastructure__eks__version="1.29", **{GOVERNANCE: {"teams": [TEAM]}}),
    ),
    "an operator alone": (
        "infrastructure.add_ons.cert_manager",
        changed(infrastructure__add_ons__training_operator=True),
    ),
    "quotas where there are none": (
        "infrastructure.add_ons.task_governance.teams",
        changed(region="ap-northeast-1", **{GOVERNANCE: {"teams": [TEAM]}}),
    ),
    "priorities where there are none": (
        "infrastructure.add_ons.task_governance.priorities",
        changed(**{GOVERNANCE: {"priorities": [{"name": "high", "weight": 9}]}}),
    ),
    "a team twice": ("infrastructure.add_ons.task_governance.teams", changed(**{GOVERNANCE: {"teams": [TEAM, TEAM]}})),
    "a quota of nothing": (
        "infrastructure.add_ons.task_governance.teams.0.instance_type",
        changed(**{GOVERNANCE: {"teams": [TEAM | {"instance_type": "ml.g5.xlarge"}]}}),
    ),
    "two roles of one account": (
        "infrastructure.job_roles.1",
        changed(infrastructure__job_roles=[EKS["infrastructure"]["job_roles"][0]] * 2),
    ),
    "checkpoints for everybody": (
        "infrastructure.buckets.checkpoints.name",
        changed(infrastructure__buckets__checkpoints__name="sagemaker-checkpoints"),
    ),
    "data of everybody": (
        "infrastructure.buckets.data.existing",
        changed(infrastructure__buckets__data__existing="sagemaker-data"),
    ),
    "scripts for nobody": (
        "infrastructure.buckets.lifecycle.name",
        changed(SLURM, infrastructure__buckets__lifecycle__name="scripts"),
    ),
    "a name for everybody": ("name", changed(name="SageMaker-research")),
    "old and new": (
        "infrastructure.buckets.data",
        changed(infrastructure__buckets__data={"name": "a-new-one", "existing": "an-old-one"}),
    ),
    "one bucket for two": (
        "infrastructure.buckets.data.existing",
        changed(infrastructure__buckets={"checkpoints": {"existing": "one"}, "data": {"existing": "one"}}),
    ),
    "two buckets for one": ("checkpoint_bucket", changed(checkpoint_bucket="another")),
    "half a file system": (
        "infrastructure.file_system.size_gib",
        changed(infrastructure__file_system__size_gib=3600),
    ),
    "only in the API: drained first": ("instance_groups.0.auto_patch.strategy", with_patch(strategy="DrainFirst")),
    "only in the API: the date": ("instance_groups.0.auto_patch.next_date", with_patch(next_date="2027-01-31")),
    "only in the API: idle": ("instance_groups.0.auto_patch.idle_s", with_patch(idle_s=3600)),
    "only in the API: how long": ("instance_groups.0.auto_patch.drain_timeout_s", with_patch(drain_timeout_s=60)),
    "only in the API: and then": ("instance_groups.0.auto_patch.on_drain_timeout", with_patch(on_drain_timeout="Skip")),
    "only in the API: a check": (
        "instance_groups.0.deep_health_checks",
        changed(instance_groups=[GROUP | {"deep_health_checks": ["MultiNodeTrainingValidation"]}]),
    ),
    "only in the API: a check of restricted groups": (
        "restricted_groups.0.deep_health_checks",
        changed(restricted_groups=EVERY_MEMBER["restricted_groups"]),
    ),
    "only in the API: restricted": (
        "restricted_groups.0.scheduled_update",
        changed(restricted_groups=EVERY_MEMBER["restricted_groups"]),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_told_with_its_field(name: str) -> None:
    path, wrong = WRONG[name]
    found = list(problems(wrong))
    assert path in [problem.path for problem in found]
    assert all(problem.hint for problem in found)


BOUND = Bindings(
    subnets=("${Subnet}",),
    security_groups=("${Group}",),
    group_subnets={"others": "${Other}"},
    execution_role="${Role}",
    cluster_role="${ClusterRole}",
    eks_cluster_arn="${Eks}",
    mount=Mount("${Dns}", "${Mount}", "/fsx"),
    lifecycle_source="s3://${Bucket}/lifecycle",
    lifecycle_script="done.sh",
)


def test_what_a_deployment_knows_fills_in_what_the_config_leaves_open() -> None:
    request = create_cluster_request(bound(deployment(EKS), BOUND))
    assert request["VpcConfig"] == {"Subnets": ["${Subnet}"], "SecurityGroupIds": ["${Group}"]}
    assert request["Orchestrator"] == {"Eks": {"ClusterArn": "${Eks}"}}
    assert request["ClusterRole"] == "${ClusterRole}"
    workers, others = request["InstanceGroups"]
    assert (workers["ExecutionRole"], "OverrideVpcConfig" in workers) == ("${Role}", False)
    assert others["OverrideVpcConfig"] == {"Subnets": ["${Other}"], "SecurityGroupIds": ["${Group}"]}
    assert workers["LifeCycleConfig"] == {"SourceS3Uri": "s3://${Bucket}/lifecycle", "OnInitComplete": "done.sh"}
    fsx = {"DnsName": "${Dns}", "MountName": "${Mount}", "MountPath": "/fsx"}
    assert workers["InstanceStorageConfigs"] == [{"FsxLustreConfig": fsx}]


def test_what_the_config_says_wins_and_roles_that_nobody_needs_are_left_out() -> None:
    stated = deployment(
        IMPORTED, execution_role=ROLE, instance_groups=[GROUP | {"lifecycle": {"source": "s3://aaa/b"}}]
    )
    request = create_cluster_request(bound(stated, BOUND))
    assert request["VpcConfig"]["Subnets"] == IMPORTED["vpc"]["subnets"]
    assert request["Orchestrator"]["Eks"]["ClusterArn"] == IMPORTED["eks_cluster_arn"]
    (group,) = request["InstanceGroups"]
    assert (group["ExecutionRole"], group["LifeCycleConfig"]["SourceS3Uri"]) == (ROLE, "s3://aaa/b")
    assert "ClusterRole" not in request


def test_without_scale_no_group_has_machines_or_asks_for_the_least() -> None:
    group = GROUP | {"min_count": 2}
    config = deployment(EVERY_MEMBER, instance_groups=[group])
    request = create_cluster_request(bound(config, BOUND, scale=False))
    groups = [*request["InstanceGroups"], *request["RestrictedInstanceGroups"]]
    assert [group["InstanceCount"] for group in groups] == [0, 0]
    assert "MinInstanceCount" not in groups[0]


def test_who_creates_what_is_to_be_deployed_is_told_how() -> None:
    told = {problem.path: problem.hint for problem in rules.problems(deployment(EKS))}
    made = {"eks_cluster_arn", "vpc", "cluster_role", *(f"instance_groups.{n}.execution_role" for n in (0, 1))}
    assert told.keys() == made
    assert all("hp-ext cluster deploy" in hint for hint in told.values())


@pytest.mark.parametrize(
    ("region", "prefix"),
    [
        ("us-west-2", "usw2"),
        ("us-east-1", "use1"),
        ("eu-central-1", "euc1"),
        ("ap-northeast-1", "apne1"),
        ("ap-southeast-2", "apse2"),
        ("eu-north-1", "eun1"),
        ("us-gov-west-1", "usgw1"),
    ],
)
def test_ids_of_zones_begin_as_aws_has_them(region: str, prefix: str) -> None:
    assert zone_prefix(region) == prefix


@given(
    own=st.tuples(st.integers(0, 255), st.integers(16, 20)),
    other=st.tuples(st.integers(0, 255), st.integers(12, 28)),
)
def test_two_ranges_are_refused_together_just_when_an_address_is_in_both(
    own: tuple[int, int], other: tuple[int, int]
) -> None:
    def span(second: int, length: int) -> tuple[int, int, str]:
        first = (10 << 24 | second << 16) >> (32 - length) << (32 - length)
        text = ".".join(str(first >> shift & 255) for shift in (24, 16, 8, 0))
        return first, first + (1 << 32 - length), f"{text}/{length}"

    start, end, cidr = span(*own)
    from_, to, connected = span(*other)
    config = deployment(infrastructure__network__cidr=cidr, infrastructure__network__connected_cidrs=[connected])
    refused = f"{NETWORK}.connected_cidrs.0" in [problem.path for problem in problems(config)]
    assert refused == (start < to and from_ < end)
