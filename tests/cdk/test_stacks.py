"""What people get wrong around HyperPod clusters, and what these stacks do about it."""

from __future__ import annotations

import ast
import ipaddress
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cdk_app import CDK, Templates, synthesise
from deployments import CASES, EKS, deployment
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext.clusters.deployment import problems

pytestmark = pytest.mark.slow  # the CDK starts node, which takes seconds


def of_type(template: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    """Properties of the resources of a type, by logical id."""
    found = template["Resources"].items()
    return {name: one.get("Properties", {}) for name, one in found if one["Type"] == kind}


# --- network -----------------------------------------------------------------------------------------


def test_efa_traffic_is_let_through_both_ways_by_rules_that_name_the_group(
    synthesised: Callable[..., Templates],
) -> None:
    network = synthesised("eks")["network"]
    group = {"Fn::GetAtt": ["MachineGroup", "GroupId"]}
    inwards, outwards = (of_type(network, f"AWS::EC2::SecurityGroup{way}") for way in ("Ingress", "Egress"))
    assert {"GroupId": group, "IpProtocol": "-1", "SourceSecurityGroupId": group} in inwards.values()
    assert {"GroupId": group, "IpProtocol": "-1", "DestinationSecurityGroupId": group} in outwards.values()
    assert {"GroupId": group, "IpProtocol": "-1", "CidrIp": "0.0.0.0/0"} in outwards.values()
    assert "SecurityGroupEgress" not in network["Resources"]["MachineGroup"]["Properties"]
    assert not any("CidrIp" in rule for rule in inwards.values())


def test_s3_is_reached_from_every_private_subnet_without_the_gateway_to_the_internet(
    synthesised: Callable[..., Templates],
) -> None:
    network = synthesised("eks")["network"]
    tables = set(of_type(network, "AWS::EC2::RouteTable")) - {"PublicRoutes"}
    s3 = network["Resources"]["S3"]["Properties"]
    assert {table["Ref"] for table in s3["RouteTableIds"]} == tables
    assert len(tables) == 4


def test_interface_endpoints_are_only_in_zones_that_have_machines(synthesised: Callable[..., Templates]) -> None:
    endpoints = of_type(synthesised("least")["network"], "AWS::EC2::VPCEndpoint")
    assert len(endpoints) == 12  # S3, and eleven services
    assert {len(one["SubnetIds"]) for one in endpoints.values() if "SubnetIds" in one} == {1}
    assert "EksAuth" not in of_type(synthesised("slurm")["network"], "AWS::EC2::VPCEndpoint")


@pytest.mark.parametrize("nat", ["one", "none"])
def test_metrics_reach_prometheus_without_the_internet(nat: str, tmp_path: Path) -> None:
    config = deployment(infrastructure__network__nat=nat, infrastructure__add_ons={"observability": {}})
    endpoints = of_type(synthesise(config, tmp_path)["network"], "AWS::EC2::VPCEndpoint").values()
    assert "com.amazonaws.us-west-2.aps-workspaces" in [one["ServiceName"] for one in endpoints]


def test_a_cluster_of_restricted_groups_alone_has_its_add_ons_and_its_zones(tmp_path: Path) -> None:
    closed = {"name": "closed", "instance_type": "ml.p5.48xlarge", "count": 2}
    config = deployment(
        instance_groups=[],
        restricted_groups=[closed],
        infrastructure__network__group_zones={"closed": "usw2-az2"},
        infrastructure__add_ons={
            "cert_manager": True,
            "training_operator": True,
            "observability": {},
            "task_governance": {"teams": [{"name": "a", "instance_type": "ml.p5.48xlarge", "count": 1}]},
        },
    )
    assert list(problems(config)) == []
    templates = synthesise(config, tmp_path)
    assert {"TrainingOperator", "CertManager", "Team1"} <= templates["addons"]["Resources"].keys()
    assert "observability" in templates
    (group,) = templates["cluster"]["Resources"]["Cluster"]["Properties"]["RestrictedInstanceGroups"]
    assert len(group["OverrideVpcConfig"]["Subnets"]) == 1
    assert "addons" not in synthesise(config, tmp_path / "empty", scale=False)


@pytest.mark.parametrize(("nat", "gateways"), [("one", 1), ("per-zone", 2), ("none", 0)])
def test_gateways_are_as_many_as_asked_for(nat: str, gateways: int, tmp_path: Path) -> None:
    network = synthesise(deployment(infrastructure__network__nat=nat), tmp_path)["network"]
    assert len(of_type(network, "AWS::EC2::NatGateway")) == gateways
    assert len(of_type(network, "AWS::EC2::EIP")) == gateways


def test_zones_are_given_by_id_where_the_config_does(synthesised: Callable[..., Templates]) -> None:
    by_id = of_type(synthesised("eks")["network"], "AWS::EC2::Subnet").values()
    by_name = of_type(synthesised("slurm")["network"], "AWS::EC2::Subnet").values()
    assert {one.get("AvailabilityZoneId") for one in by_id} == {"usw2-az1", "usw2-az2"}
    assert {one.get("AvailabilityZone") for one in by_name} == {"us-west-2a"}


@given(second=st.integers(0, 255), length=st.integers(16, 20), zones=st.integers(1, 3))
def test_subnets_are_apart_and_stay_where_they_are_when_a_zone_is_added(second: int, length: int, zones: int) -> None:
    cidr = f"10.{second}.0.0/{length}"
    names = ["a", "b", "c"][:zones]
    from hyperpod_cdk.subnets import plan_subnets  # not above: its package starts node

    plans = plan_subnets(cidr, names)
    ranges = [ipaddress.ip_network(one) for plan in plans for one in (plan.machines, plan.control, plan.public)]
    whole = ipaddress.ip_network(cidr)
    assert all(one.subnet_of(whole) for one in ranges)  # type: ignore[arg-type]
    assert not any(one.overlaps(other) for place, one in enumerate(ranges) for other in ranges[place + 1 :])
    assert plan_subnets(cidr, names[:-1]) == plans[:-1]
    assert {ipaddress.ip_network(plan.machines).prefixlen for plan in plans} == {length + 2}


# --- storage -----------------------------------------------------------------------------------------

BUCKETS = {"eks": {"Checkpoints", "Data", "Logs"}, "slurm": {"Checkpoints", "Data", "Lifecycle", "Logs"}}


@pytest.mark.parametrize("case", BUCKETS)
def test_buckets_are_private_versioned_encrypted_and_kept(case: str, synthesised: Callable[..., Templates]) -> None:
    storage = synthesised(case)["storage"]
    kept = {
        name: one for name, one in storage["Resources"].items() if one["Type"] in ("AWS::S3::Bucket", "AWS::KMS::Key")
    }
    assert all(one["DeletionPolicy"] == one["UpdateReplacePolicy"] == "Retain" for one in kept.values())
    buckets = of_type(storage, "AWS::S3::Bucket")
    assert {name[:-8] for name in buckets} == BUCKETS[case]
    for name, bucket in buckets.items():
        assert set(bucket["PublicAccessBlockConfiguration"].values()) == {True}
        assert bucket["VersioningConfiguration"] == {"Status": "Enabled"}
        (rule,) = bucket["BucketEncryption"]["ServerSideEncryptionConfiguration"]
        plain = rule["ServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"
        assert plain == name.startswith("Logs")
        assert plain or (rule["BucketKeyEnabled"] and "LoggingConfiguration" in bucket)


def test_only_the_lifecycle_bucket_is_one_that_every_hyperpod_role_can_read(
    synthesised: Callable[..., Templates],
) -> None:
    for case in BUCKETS:
        for name, bucket in of_type(synthesised(case)["storage"], "AWS::S3::Bucket").items():
            text = json.dumps(bucket.get("BucketName", ""))
            assert ("sagemaker-" in text) == name.startswith("Lifecycle")


def expiring(template: dict[str, Any]) -> Iterator[str]:
    """Prefixes below which the checkpoint bucket removes what is current."""
    (bucket,) = (one for name, one in of_type(template, "AWS::S3::Bucket").items() if name.startswith("Checkpoints"))
    for rule in bucket["LifecycleConfiguration"]["Rules"]:
        if {"ExpirationInDays", "ExpirationDate", "ExpiredObjectDeleteMarker"} & rule.keys():
            yield rule.get("Prefix", "")


@pytest.mark.parametrize("case", BUCKETS)
def test_no_rule_removes_a_current_checkpoint_of_a_job_however_old(
    case: str, synthesised: Callable[..., Templates]
) -> None:
    storage = synthesised(case)["storage"]
    checkpoints = storage["Outputs"]["CheckpointPrefix"]["Value"] + "/"
    assert list(expiring(storage)) == ["ephemeral/"]
    assert not any(prefix.startswith(checkpoints) or checkpoints.startswith(prefix) for prefix in expiring(storage))
    (bucket,) = (one for name, one in of_type(storage, "AWS::S3::Bucket").items() if name.startswith("Checkpoints"))
    rules = bucket["LifecycleConfiguration"]["Rules"]
    whole = [rule for rule in rules if "Prefix" not in rule]
    assert [set(rule) - {"Status"} for rule in whole] == [
        {"AbortIncompleteMultipartUpload", "NoncurrentVersionExpiration"}
    ]


def test_the_file_system_is_beside_the_machines_and_waits_for_its_rules(synthesised: Callable[..., Templates]) -> None:
    templates = synthesised("slurm")
    system = templates["storage"]["Resources"]["FileSystem"]
    machines = templates["cluster"]["Resources"]["Cluster"]["Properties"]["VpcConfig"]["Subnets"]
    assert system["Properties"]["SubnetIds"] == machines
    rules = of_type(templates["storage"], "AWS::EC2::SecurityGroupIngress")
    assert set(system["DependsOn"]) == set(rules)
    assert {(rule["FromPort"], rule["ToPort"]) for rule in rules.values()} == {(988, 988), (1018, 1023)}
    mounts = templates["cluster"]["Resources"]["Cluster"]["Properties"]["InstanceGroups"][0]["InstanceStorageConfigs"]
    assert mounts[0]["FsxLustreConfig"]["MountPath"] == "/fsx"


# --- EKS, cluster, add-ons ---------------------------------------------------------------------------


def test_the_control_plane_is_as_hyperpod_needs_it(synthesised: Callable[..., Templates]) -> None:
    for case, public in (("eks", True), ("least", False)):
        (eks,) = of_type(synthesised(case)["eks"], "AWS::EKS::Cluster").values()
        assert eks["AccessConfig"]["AuthenticationMode"] == "API_AND_CONFIG_MAP"
        assert eks["EncryptionConfig"][0]["Resources"] == ["secrets"]
        network = eks["ResourcesVpcConfig"]
        assert (network["EndpointPrivateAccess"], network["EndpointPublicAccess"]) == (True, public)
        assert network.get("PublicAccessCidrs") == (["203.0.113.0/24"] if public else None)
        assert len(network["SubnetIds"]) == 2
        assert {"Key": "SageMaker", "Value": "true"} in eks["Tags"]


def test_the_cluster_waits_for_the_rights_of_its_roles(synthesised: Callable[..., Templates]) -> None:
    template = synthesised("eks")["cluster"]
    roles = ("MachineRole", "HyperPodRole")
    policies = {name for name in of_type(template, "AWS::IAM::Policy") if name.startswith(roles)}
    assert len(policies) == 2
    assert set(template["Resources"]["Cluster"]["DependsOn"]) == policies


def test_the_training_operator_has_its_identity_and_certificates_first(synthesised: Callable[..., Templates]) -> None:
    addons = synthesised("eks")["addons"]["Resources"]
    assert set(addons["TrainingOperator"]["DependsOn"]) == {"CertManager", "OperatorIdentity"}
    assert "PodIdentityAssociations" not in addons["TrainingOperator"]["Properties"]
    role = next(one for name, one in addons.items() if one["Type"] == "AWS::IAM::Role")
    (statement,) = role["Properties"]["AssumeRolePolicyDocument"]["Statement"]
    assert statement["Action"] == ["sts:AssumeRole", "sts:TagSession"]


def test_priorities_and_quotas_are_made_where_cloudformation_can(tmp_path: Path) -> None:
    governance = EKS["infrastructure"]["add_ons"]["task_governance"] | {
        "priorities": [{"name": "high", "weight": 90}, {"name": "low", "weight": 10}]
    }
    config = deployment(
        CASES["eks"],
        region="us-east-1",
        infrastructure__network={"zones": ["use1-az1", "use1-az2"]},
        infrastructure__add_ons__task_governance=governance,
    )
    addons = synthesise(config, tmp_path)["addons"]["Resources"]
    assert addons["Priorities"]["Properties"]["SchedulerConfig"] == {
        "PriorityClasses": [{"Name": "high", "Weight": 90}, {"Name": "low", "Weight": 10}],
        "FairShare": "Enabled",
    }
    assert (addons["Team1"]["DependsOn"], addons["Priorities"]["DependsOn"]) == (["Priorities"], ["TaskGovernance"])


def test_what_is_there_already_is_used_and_not_made(synthesised: Callable[..., Templates]) -> None:
    templates = synthesised("imported")
    assert set(templates) == {"storage", "cluster"}
    assert of_type(templates["storage"], "AWS::S3::Bucket") == {}
    outputs = {name: one["Value"] for name, one in templates["storage"]["Outputs"].items()}
    assert (outputs["CheckpointBucket"], outputs["DataBucket"]) == ("my-checkpoints", "my-data")
    assert templates["cluster"]["Outputs"]["EksClusterName"]["Value"] == "research"


def test_lifecycle_scripts_that_the_cluster_names_are_shipped(synthesised: Callable[..., Templates]) -> None:
    for group in synthesised("slurm")["cluster"]["Resources"]["Cluster"]["Properties"]["InstanceGroups"]:
        assert (CDK / "lifecycle" / group["LifeCycleConfig"]["OnInitComplete"]).is_file()


def test_the_app_stands_on_config_catalog_and_the_request_only() -> None:
    allowed = ("hyperpod_ext.config", "hyperpod_ext.catalog", "hyperpod_ext.errors", "hyperpod_ext.clusters")
    for file in CDK.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            ours = [name for name in names if name.split(".")[0] in ("hyperpod_ext", "cli")]
            assert all(name.startswith(allowed) for name in ours), (file, ours)
            assert not any(name.startswith("hyperpod_ext.clusters.cdk") for name in ours), (file, ours)


@pytest.mark.parametrize(
    ("namespace", "teams", "named"),
    [
        ("hyperpod-ns-a", ["b", "a"], ("hyperpod-ns-a", "hyperpod-ns-a-localqueue")),
        ("default", ["a"], ("default", None)),
        (None, ["b", "a"], ("hyperpod-ns-b", "hyperpod-ns-b-localqueue")),
        (None, [], (None, None)),
    ],
)
def test_a_job_that_names_the_cluster_gets_a_queue_of_its_own_namespace(
    namespace: str | None, teams: list[str], named: tuple[str | None, str | None], tmp_path: Path
) -> None:
    quota = {"instance_type": "ml.p5.48xlarge", "count": 1}
    roles = [{"namespace": namespace, "service_account": "training", "jobs": "a"}] if namespace else []
    config = deployment(
        infrastructure__job_roles=roles,
        infrastructure__add_ons__task_governance={"teams": [quota | {"name": team} for team in teams]},
    )
    outputs = synthesise(config, tmp_path)["cluster"]["Outputs"]
    found = tuple(outputs[name]["Value"] if name in outputs else None for name in ("Namespace", "QueueName"))
    assert found == named
