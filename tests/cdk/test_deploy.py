"""Every stack is created, changed and deleted by moto's CloudFormation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
from cdk_app import Templates, synthesise
from cfn_account import Account, client
from deployments import CASES, deployment

pytestmark = pytest.mark.slow  # the CDK starts node, which takes seconds


def counts(account: Account) -> dict[str, int]:
    (cluster,) = account.world.sagemaker.clusters.values()
    return {group["InstanceGroupName"]: group["TargetCount"] for group in cluster["InstanceGroups"]}


def fill(account: Account, storage: dict[str, str]) -> dict[str, str]:
    """One object in every bucket; key by bucket."""
    buckets = [storage[key] for key in ("CheckpointBucket", "DataBucket", "LifecycleBucket") if key in storage]
    for bucket in buckets:
        account.s3.put_object(Bucket=bucket, Key="jobs/a/manifest.json", Body=b"{}")
    return dict.fromkeys(buckets, "jobs/a/manifest.json")


@pytest.mark.parametrize("case", ["eks", "slurm"])
def test_stacks_are_created_scaled_grown_and_deleted_and_buckets_stay(
    case: str, account: Account, synthesised: Callable[..., Templates], tmp_path: Path
) -> None:
    name, first, world = "research", synthesised(case, scale=False), account.world
    account.deploy(name, first)
    assert account.statuses() == {f"{name}-{part}": "CREATE_COMPLETE" for part in first}
    assert set(counts(account).values()) == {0}

    scaled = synthesised(case, scale=True)
    account.deploy(name, scaled)
    asked = {group["name"]: group["count"] for group in CASES[case]["instance_groups"]}
    assert counts(account) == asked
    assert set(account.statuses()) == {f"{name}-{part}" for part in scaled}

    grown = grow(case, tmp_path)
    account.deploy(name, grown)
    assert counts(account) == asked | {"more": 3}
    assert set(account.statuses().values()) <= {"CREATE_COMPLETE", "UPDATE_COMPLETE"}
    assert [call for call, _ in world.sagemaker.calls] == ["CreateCluster", "UpdateCluster", "UpdateCluster"]
    assert world.replaced == []

    objects = fill(account, account.outputs(f"{name}-storage"))
    account.delete(name, grown)
    assert account.statuses() == {}
    assert world.sagemaker.clusters == {}
    for bucket, key in objects.items():
        assert account.s3.get_object(Bucket=bucket, Key=key)["Body"].read() == b"{}"


def grow(case: str, folder: Path) -> Templates:
    more = CASES[case]["instance_groups"][-1] | {"name": "more", "count": 3}
    config = deployment(CASES[case], instance_groups=[*CASES[case]["instance_groups"], more])
    return synthesise(config, folder)


def test_a_change_that_only_a_new_cluster_can_have_replaces_it(
    account: Account, synthesised: Callable[..., Templates]
) -> None:
    """The shim sees a replacement when there is one: that there was none above says something."""
    account.deploy("research", synthesised("slurm"))
    moved = copy.deepcopy(synthesised("slurm")["cluster"])
    moved["Resources"]["Cluster"]["Properties"]["VpcConfig"]["Subnets"] = ["subnet-elsewhere"]
    account.deploy("research", {"cluster": moved})
    assert account.world.replaced == ["research"]


def test_what_is_made_is_what_outputs_name(account: Account, synthesised: Callable[..., Templates]) -> None:
    account.deploy("research", synthesised("eks"))
    outputs = account.outputs("research-storage") | account.outputs("research-cluster")
    (cluster,) = account.world.sagemaker.clusters.values()
    assert outputs["SubnetIds"].split(",") == cluster["VpcConfig"]["Subnets"]
    assert outputs["SecurityGroupIds"].split(",") == cluster["VpcConfig"]["SecurityGroupIds"]
    assert outputs["ExecutionRoleArn"] == cluster["InstanceGroups"][0]["ExecutionRole"]
    ec2 = client("ec2")
    assert len(ec2.describe_subnets(SubnetIds=outputs["SubnetIds"].split(","))["Subnets"]) == 1
    associations = account.world.recorded["AWS::EKS::PodIdentityAssociation"]
    assert outputs["JobRoleArn"] in [one["RoleArn"] for one in associations]
    assert {one["ClusterName"] for one in associations} == {outputs["EksClusterName"]}
    named = {"CheckpointPrefix": "jobs", "Namespace": "hyperpod-ns-a", "QueueName": "hyperpod-ns-a-localqueue"}
    assert named.items() <= outputs.items()
    assert outputs["FileSystemDns"].startswith("fs-")
