"""What AWS tells of an account, by moto, and what the checks make of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import GROUP, LEAST, PLAN, SLURM, cluster, with_group
from command import call_hp_ext

from hyperpod_ext.clusters import account
from hyperpod_ext.clusters.account import with_account
from hyperpod_ext.clusters.checks import findings
from hyperpod_ext.jobs.sagemaker import client


@pytest.fixture
def moto(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    mock_aws = pytest.importorskip("moto").mock_aws
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.delitem(account._READERS, "quotas")  # moto has no ListServiceQuotas: a test of its own is below
    client.client.cache_clear()
    with mock_aws():
        yield lambda service: client.client(service, "us-west-2")
    client.client.cache_clear()


def subnet(moto: Any, cidr: str) -> tuple[str, str]:
    """A new subnet with this range, and the id of its zone."""
    ec2 = moto("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    made = ec2.create_subnet(VpcId=vpc, CidrBlock=cidr, AvailabilityZone="us-west-2b")["Subnet"]
    return made["SubnetId"], made["AvailabilityZoneId"]


def test_subnets_are_read_and_too_small_ones_are_told(tmp_path: Path, moto: Any) -> None:
    small, zone = subnet(moto, "10.0.0.0/25")
    spec = LEAST | {"vpc": {"subnets": [small], "security_groups": ["sg-0"]}}
    asked, _ = with_account(cluster(spec))
    assert asked.account is not None
    assert (asked.account.subnets[small].zone, asked.account.subnets[small].free_addresses) == (zone, 123)
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps(spec, indent=1))
    command = ("cluster", "create", "-f", str(file), "--dry-run", "-o", "json")
    assert call_hp_ext(*command).code == 0
    (told,) = call_hp_ext(*command, "--check-account").json["error"]["problems"]
    assert (told["rule"], told["path"], told["source"]) == ("HPX211", "instance_groups.0.count", str(file))


def test_a_script_that_is_not_in_the_bucket_is_told(tmp_path: Path, moto: Any) -> None:
    s3 = moto("s3")
    s3.create_bucket(Bucket="sagemaker-a", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    s3.put_object(Bucket="sagemaker-a", Key="b/other.sh", Body=b"")
    spec = {name: SLURM[name] for name in ("name", "region", "orchestrator", "execution_role")}
    spec |= {"instance_groups": [GROUP | {"lifecycle": {"source": "s3://sagemaker-a/b"}}]}
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps(spec, indent=1))
    command = ("cluster", "create", "-f", str(file), "--dry-run", "--check-account", "-o", "json")
    (told,) = call_hp_ext(*command).json["error"]["problems"]
    assert (told["rule"], told["path"]) == ("HPX208", "instance_groups.0.lifecycle.source")
    s3.put_object(Bucket="sagemaker-a", Key="b/on_create.sh", Body=b"")
    assert call_hp_ext(*command).code == 0


def test_what_cannot_be_read_is_said_and_is_as_stated(moto: Any) -> None:
    stated = {"subnets": {"subnet-0": {"zone": "usw2-az2"}}}
    asked, unread = with_account(cluster(account=stated))
    assert asked.account is not None
    assert asked.account.subnets["subnet-0"].zone == "usw2-az2"
    assert [one for one in unread if one.startswith("account.subnets is not checked: ") and "subnet" in one], unread
    assert any(sentence.startswith("account.eks_version is not checked: ") for sentence in unread)


def test_quotas_and_plans_are_read_as_the_services_models_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    boto3, stub = pytest.importorskip("boto3"), pytest.importorskip("botocore.stub")
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-west-2"}
    clients = {name: boto3.client(name, **keys) for name in ("service-quotas", "sagemaker")}
    stubs = {name: stub.Stubber(one) for name, one in clients.items()}
    quotas = [
        {"QuotaName": "ml.p5.48xlarge for cluster usage", "QuotaCode": "L-0123ABCD", "Value": 2.0},
        {"QuotaName": "ml.p5.48xlarge for training job usage", "QuotaCode": "L-00000000", "Value": 9.0},
    ]
    stubs["service-quotas"].add_response("list_service_quotas", {"Quotas": quotas}, {"ServiceCode": "sagemaker"})
    held = {"ReservedCapacityArn": "arn:aws:sagemaker:us-west-2:123456789012:reserved-capacity/abcdefghijklmn"}
    held |= {"InstanceType": "ml.p5e.48xlarge", "TotalInstanceCount": 4, "Status": "Active"}
    plan = {"TrainingPlanArn": PLAN, "TrainingPlanName": "plan-1", "Status": "Active", "TotalInstanceCount": 4}
    summaries = [held | {"AvailabilityZoneId": "usw2-az3"}]
    answer = plan | {"ReservedCapacitySummaries": summaries}
    stubs["sagemaker"].add_response("describe_training_plan", answer, {"TrainingPlanName": "plan-1"})
    for one in stubs.values():
        one.activate()
    monkeypatch.setattr(account, "client", lambda service, _region: clients[service])
    for name in ("subnets", "eks_version"):
        monkeypatch.delitem(account._READERS, name)
    asked, unread = with_account(with_group(training_plan=PLAN))
    assert (unread, asked.account is not None) == ([], True)
    assert [one.rule for one in findings(asked, "error")] == ["HPX214"]
    (warned,) = findings(asked, "warning")
    assert "`ml.p5.48xlarge for cluster usage` (L-0123ABCD) is 2" in warned.message
