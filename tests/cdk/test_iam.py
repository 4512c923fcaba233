"""Who may do what, decided by evaluating the policies of the synthesised stacks, not by reading them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from account import ACCOUNT, Account, documents
from cdk_app import synthesise
from clusters import GROUP
from deployments import IMPORTED, OWN_NETWORKS, SLURM, deployment
from moto.iam.aws_managed_policies import aws_managed_policies_data
from policy import Principal, Request, allowed, as_list

MANAGED = {name: one["Document"] for name, one in json.loads(aws_managed_policies_data).items()}
OTHER_BUCKET = "somebody-elses"
Synthesised = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def eks(synthesised: Synthesised) -> Account:
    return Account(synthesised("eks"))


@pytest.fixture(scope="module")
def slurm(synthesised: Synthesised) -> Account:
    return Account(synthesised("slurm"))


@pytest.fixture(scope="module")
def pod(eks: Account) -> Principal:
    """A pod of the job tiny-gpt."""
    return eks.role(eks.output("JobRoleArn"), MANAGED)


@pytest.fixture(scope="module")
def sweep(eks: Account) -> Principal:
    """A pod of a service account whose jobs begin with `sweep-`."""
    return eks.role(eks.output("JobRoleArns").split(",")[1], MANAGED)


def checkpoints(account: Account) -> str:
    return account.output("CheckpointBucket")


@pytest.mark.parametrize("folder", ["jobs", "ephemeral", "milestones"])
@pytest.mark.parametrize(
    "action", ["GetObject", "PutObject", "DeleteObject", "AbortMultipartUpload", "ListMultipartUploadParts"]
)
def test_a_pod_does_with_its_own_jobs_checkpoints_what_the_runtime_does(
    eks: Account, pod: Principal, folder: str, action: str
) -> None:
    assert eks.s3(pod, action, checkpoints(eks), f"{folder}/tiny-gpt/step-10/rank-0.distcp")


@pytest.mark.parametrize("action", ["GetObject", "PutObject", "DeleteObject"])
@pytest.mark.parametrize(
    "key", ["jobs/other/x", "jobs/tiny-gpt-2/x", "jobs/tiny-gpt", "tiny-gpt/x", "x", "logs/jobs/tiny-gpt/x"]
)
def test_a_pod_touches_no_other_jobs_checkpoints(eks: Account, pod: Principal, action: str, key: str) -> None:
    assert not eks.s3(pod, action, checkpoints(eks), key)


def test_a_pod_lists_its_own_job_and_nothing_else(eks: Account, pod: Principal) -> None:
    bucket = checkpoints(eks)
    assert eks.s3(pod, "ListBucket", bucket, prefix="jobs/tiny-gpt/")
    for prefix in (None, "", "jobs/", "jobs/other/", "jobs/tiny-gpt-2/"):
        assert not eks.s3(pod, "ListBucket", bucket, prefix=prefix), prefix


def test_a_name_with_a_star_covers_what_begins_so(eks: Account, sweep: Principal) -> None:
    bucket = checkpoints(eks)
    assert eks.s3(sweep, "PutObject", bucket, "jobs/sweep-7/x")
    assert eks.s3(sweep, "ListBucket", bucket, prefix="jobs/sweep-7/")
    for key in ("jobs/tiny-gpt/x", "jobs/sweeper/x", "jobs/other/sweep-7/x"):
        assert not eks.s3(sweep, "PutObject", bucket, key), key


def test_a_pod_reads_data_and_writes_none(eks: Account, pod: Principal) -> None:
    data = eks.output("DataBucket")
    assert eks.s3(pod, "GetObject", data, "shards/0001")
    assert eks.s3(pod, "ListBucket", data)
    for action in ("PutObject", "DeleteObject"):
        assert not eks.s3(pod, action, data, "shards/0001")


@pytest.mark.parametrize("action", ["GetObject", "PutObject", "ListBucket"])
def test_no_role_reaches_another_bucket(
    eks: Account, slurm: Account, pod: Principal, sweep: Principal, action: str
) -> None:
    machines = [one.role(one.output("ExecutionRoleArn"), MANAGED) for one in (eks, slurm)]
    for account, who in ((eks, pod), (eks, sweep), (eks, machines[0]), (slurm, machines[1])):
        assert not account.s3(who, action, OTHER_BUCKET, "jobs/tiny-gpt/x" if action != "ListBucket" else "")


def test_nothing_passes_without_tls_or_with_an_old_one(eks: Account, slurm: Account, pod: Principal) -> None:
    machine = slurm.role(slurm.output("ExecutionRoleArn"), MANAGED)
    for account, who in ((eks, pod), (slurm, machine)):
        bucket, key = checkpoints(account), "jobs/tiny-gpt/x"
        for action in ("GetObject", "PutObject"):
            assert account.s3(who, action, bucket, key)
            assert not account.s3(who, action, bucket, key, tls=False)
            assert not account.s3(who, action, bucket, key, tls_version=1.1)


def test_nothing_is_written_but_under_our_key(eks: Account, pod: Principal) -> None:
    bucket, key, ours = checkpoints(eks), "jobs/tiny-gpt/x", eks.output("KmsKeyArn")
    assert eks.default_key(bucket) == ours
    assert eks.s3(pod, "PutObject", bucket, key)  # the bucket's own default
    assert eks.s3(pod, "PutObject", bucket, key, encryption="aws:kms", kms_key=ours)
    assert not eks.s3(pod, "PutObject", bucket, key, encryption="AES256")
    assert not eks.s3(pod, "PutObject", bucket, key, encryption="aws:kms")  # the account's key for S3
    another = f"arn:aws:kms:us-west-2:{ACCOUNT}:key/another"
    assert not allowed(
        Request(pod, "s3:PutObject", f"arn:aws:s3:::{bucket}/{key}", {
            "aws:securetransport": True, "s3:tlsversion": 1.2, "s3:x-amz-server-side-encryption": "aws:kms",
            "s3:x-amz-server-side-encryption-aws-kms-key-id": another,
        }),
        eks.bucket_policy(bucket),
    )  # fmt: skip


def test_the_key_serves_a_pod_only_through_s3(eks: Account, pod: Principal) -> None:
    key = eks.output("KmsKeyArn")
    assert eks.kms(pod, "Decrypt", key, via="s3.us-west-2.amazonaws.com")
    assert not eks.kms(pod, "Decrypt", key)
    assert not eks.kms(pod, "Decrypt", key, via="s3.eu-west-1.amazonaws.com")
    for action in ("ScheduleKeyDeletion", "PutKeyPolicy", "CreateGrant", "DisableKey"):
        assert not eks.kms(pod, action, key, via="s3.us-west-2.amazonaws.com")
    stranger = Principal("arn:aws:iam::999999999999:role/a", policies=({"Statement": [_ALL]},))
    assert not eks.kms(stranger, "Decrypt", key)


_ALL = {"Effect": "Allow", "Action": "*", "Resource": "*"}


def test_machines_of_eks_touch_no_checkpoint_and_no_data(eks: Account) -> None:
    machine = eks.role(eks.output("ExecutionRoleArn"), MANAGED)
    for bucket in (checkpoints(eks), eks.output("DataBucket")):
        for action in ("GetObject", "PutObject", "DeleteObject"):
            assert not eks.s3(machine, action, bucket, "jobs/tiny-gpt/x")
        assert not eks.s3(machine, "ListBucket", bucket, prefix="jobs/")


def test_machines_of_slurm_write_checkpoints_of_any_job_and_read_data_and_scripts(slurm: Account) -> None:
    machine = slurm.role(slurm.output("ExecutionRoleArn"), MANAGED)
    for job in ("one", "two"):
        assert slurm.s3(machine, "PutObject", checkpoints(slurm), f"jobs/{job}/x")
    assert not slurm.s3(machine, "PutObject", checkpoints(slurm), "x")
    assert slurm.s3(machine, "GetObject", slurm.output("DataBucket"), "shards/0001")
    assert not slurm.s3(machine, "PutObject", slurm.output("DataBucket"), "shards/0001")
    scripts = slurm.output("LifecycleBucket")
    assert scripts.startswith("sagemaker-")
    assert not slurm.s3(machine, "PutObject", scripts, "lifecycle/x")


@pytest.mark.parametrize("number", [0, 1])
def test_machines_have_interfaces_and_the_file_system_where_their_group_is(
    synthesised: Synthesised, number: int
) -> None:
    """The first group is where the cluster is, the second names a network of its own."""
    account = Account(synthesised("own networks"))
    machine = account.role(account.output("ExecutionRoleArn"), MANAGED)
    group = f"sg-0123456789abcdef{number}"

    def may_create(kind: str, name: str) -> bool:
        resource = f"arn:aws:ec2:us-west-2:{ACCOUNT}:{kind}/{name}"
        return allowed(Request(machine, "ec2:CreateNetworkInterface", resource, {}))

    assert may_create("subnet", f"subnet-0123456789abcdef{number}")
    assert may_create("security-group", group)
    assert not may_create("subnet", "subnet-0123456789abcdef2")
    rules = account.of_kind("AWS::EC2::SecurityGroupIngress")
    assert group in {rule.get("SourceSecurityGroupId") for _, _, rule in rules}


def test_roles_are_taken_only_by_the_services_that_are_meant(eks: Account) -> None:
    arn = eks.output("JobRoleArn")
    found = (one for _, _, one in eks.of_kind("AWS::EKS::PodIdentityAssociation") if one["RoleArn"] == arn)
    mine = {"aws:sourceaccount": ACCOUNT} | {
        f"aws:requesttag/{tag}": one[member]
        for one in found
        for tag, member in (
            ("eks-cluster-name", "ClusterName"),
            ("kubernetes-namespace", "Namespace"),
            ("kubernetes-service-account", "ServiceAccount"),
        )
    }
    pods = Principal(service="pods.eks.amazonaws.com")

    def takes(who: Principal, action: str = "sts:AssumeRole", role: str = arn, **context: str) -> bool:
        return allowed(Request(who, action, role, mine | context), eks.trust(role))

    assert takes(pods)
    assert takes(pods, "sts:TagSession")
    assert not allowed(Request(pods, "sts:AssumeRole", arn, mine | {"aws:sourceaccount": "9" * 12}), eks.trust(arn))
    for key in mine:
        assert not allowed(Request(pods, "sts:AssumeRole", arn, mine | {key: "other"}), eks.trust(arn))
    for who in (Principal(service="sagemaker.amazonaws.com"), Principal(service="ec2.amazonaws.com"),
                Principal(f"arn:aws:iam::{ACCOUNT}:role/x", policies=({"Statement": [_ALL]},))):  # fmt: skip
        assert not takes(who)
    machines = eks.output("ExecutionRoleArn")
    assert takes(Principal(service="sagemaker.amazonaws.com"), role=machines)
    assert not takes(pods, role=machines)


def test_only_s3s_log_delivery_of_this_account_writes_access_logs(eks: Account, pod: Principal) -> None:
    (logs,) = (one["Bucket"] for _p, _n, one in eks.of_kind("AWS::S3::BucketPolicy") if "logging.s3" in json.dumps(one))
    delivery = Principal(service="logging.s3.amazonaws.com")
    of_ours = {"source_account": ACCOUNT, "source_arn": f"arn:aws:s3:::{checkpoints(eks)}"}
    assert eks.s3(delivery, "PutObject", logs, "checkpoints/x", **of_ours)
    assert not eks.s3(delivery, "PutObject", logs, "checkpoints/x", **of_ours | {"source_account": "9" * 12})
    assert not eks.s3(delivery, "PutObject", logs, "checkpoints/x", **of_ours | {"source_arn": "arn:aws:s3:::other"})
    assert not eks.s3(pod, "PutObject", logs, "checkpoints/x")


@pytest.mark.parametrize("case", ["eks", "slurm", "least", "imported"])
def test_no_statement_allows_everything_but_to_the_key_in_its_own_policy(synthesised: Synthesised, case: str) -> None:
    templates = synthesised(case)
    for where, statement in documents(templates):
        if statement["Effect"] == "Deny":
            continue
        actions = as_list(statement["Action"])
        assert "*" not in actions, where
        assert not any(one.endswith(":*") and one != "kms:*" for one in actions), (where, actions)
        assert "NotAction" not in statement, where
        if "kms:*" in actions:
            assert templates[where.split(".")[0]]["Resources"][where.split(".")[1]]["Type"] == "AWS::KMS::Key"


@pytest.mark.parametrize("case", ["eks", "slurm"])
def test_the_last_checkpoint_never_expires(synthesised: Synthesised, case: str) -> None:
    account = Account(synthesised(case))
    for part, name, bucket in account.of_kind("AWS::S3::Bucket"):
        if account.resolve({"Ref": name}, part) != checkpoints(account):
            continue
        assert bucket["VersioningConfiguration"]["Status"] == "Enabled"
        expiring = [rule for rule in bucket["LifecycleConfiguration"]["Rules"] if "ExpirationInDays" in rule]
        assert [rule["Prefix"] for rule in expiring] == ["ephemeral/"]
        return
    pytest.fail("there is no checkpoint bucket")


# --- keys, buckets and networks of the customer's own ---------------------------------------------------

DISK = f"arn:aws:kms:us-west-2:{ACCOUNT}:key/11111111-2222-3333-4444-555555555555"
DATA_KEY = f"arn:aws:kms:us-west-2:{ACCOUNT}:key/66666666-7777-8888-9999-000000000000"
BUCKETS = {"checkpoints": {"existing": "my-checkpoints"}, "data": {"existing": "my-data", "kms_key": DATA_KEY}}
MINE: dict[str, Any] = OWN_NETWORKS | {
    "auto_scaling": {},
    "continuous_provisioning": True,
    "instance_groups": [
        GROUP | {"storage": [{"kind": "ebs", "root": True, "kms_key": DISK}], "lifecycle": {"source": "s3://mine/lc"}},
        {
            "name": "others",
            "instance_type": "ml.g5.12xlarge",
            "count": 2,
            "storage": [{"kind": "ebs", "size_gib": 500, "kms_key": "alias/disk"}],
            "lifecycle": {"source": "s3://sagemaker-mine/lc"},
        },
        {
            "name": "strangers",
            "instance_type": "ml.g5.12xlarge",
            "count": 2,
            "execution_role": f"arn:aws:iam::{ACCOUNT}:role/theirs",
            "lifecycle": {"source": "s3://theirs/lc"},
        },
    ],
    "infrastructure": IMPORTED["infrastructure"] | {"buckets": BUCKETS},
}


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Account:
    return Account(synthesise(deployment(MINE), tmp_path_factory.mktemp("mine")))


def test_machines_read_the_scripts_of_their_groups_in_any_bucket(mine: Account) -> None:
    machine = mine.role(mine.output("ExecutionRoleArn"), MANAGED)

    def may(action: str, resource: str) -> bool:
        return allowed(Request(machine, f"s3:{action}", f"arn:aws:s3:::{resource}", {}))

    assert may("GetObject", "mine/lc/on_create.sh")
    assert may("ListBucket", "mine")
    assert not may("GetObject", "mine/other/on_create.sh")
    assert not may("PutObject", "mine/lc/on_create.sh")
    assert not may("GetObject", "theirs/lc/on_create.sh"), "that group has a role of its own"


def test_keys_of_disks_and_existing_buckets_can_be_used(mine: Account) -> None:
    machine, scaler = (mine.role(mine.output("ExecutionRoleArn"), MANAGED), hyperpod(mine))
    pod = mine.role(mine.output("JobRoleArn"), MANAGED)
    whole_account = {"Statement": [{"Effect": "Allow", "Action": "kms:*", "Resource": "*", "Principal": {"AWS": ROOT}}]}

    def may(who: Principal, action: str, key: str, **context: Any) -> bool:
        told = {name.replace("__", ":"): value for name, value in context.items()}
        return allowed(Request(who, f"kms:{action}", key, told), whole_account)

    aliased = f"arn:aws:kms:us-west-2:{ACCOUNT}:key/of-the-alias"
    for key, more in ((DISK, {}), (aliased, {"kms__resourcealiases": ["alias/disk"]})):
        assert may(machine, "Decrypt", key, **more)
        assert may(machine, "CreateGrant", key, **more, kms__grantisforawsresource="true")
        assert not may(machine, "CreateGrant", key, **more, kms__grantisforawsresource="false")
        grants = {"kms__viaservice": "sagemaker.us-west-2.amazonaws.com", "kms__grantisforawsresource": "true"}
        assert may(scaler, "CreateGrant", key, **more, **grants, kms__grantoperations=["Decrypt"])
    assert not may(machine, "Decrypt", aliased, kms__resourcealiases=["alias/other"])
    assert not may(machine, "Decrypt", f"arn:aws:kms:us-west-2:{ACCOUNT}:key/other")
    assert may(pod, "Decrypt", DATA_KEY, kms__viaservice="s3.us-west-2.amazonaws.com")
    assert not may(pod, "Decrypt", DATA_KEY)
    assert not may(pod, "Decrypt", DISK, kms__viaservice="s3.us-west-2.amazonaws.com")


ROOT = f"arn:aws:iam::{ACCOUNT}:root"


def hyperpod(account: Account) -> Principal:
    """The role with which HyperPod adds machines."""
    (arn,) = (one["ClusterRole"] for _, _, one in account.of_kind("AWS::SageMaker::Cluster"))
    return account.role(arn, MANAGED)


@pytest.mark.parametrize("action", ["DeleteNetworkInterface", "ModifyNetworkInterfaceAttribute", "CreateTags"])
def test_machines_change_interfaces_of_their_own_network_alone(mine: Account, eks: Account, action: str) -> None:
    for account in (mine, eks):
        machine = account.role(account.output("ExecutionRoleArn"), MANAGED)
        vpc = "vpc-0123456789abcdef0" if account is mine else "network-vpc"
        interface = f"arn:aws:ec2:us-west-2:{ACCOUNT}:network-interface/eni-0"

        def may(network: str, machine: Principal = machine, interface: str = interface, **more: str) -> bool:
            where = {"ec2:vpc": f"arn:aws:ec2:us-west-2:{ACCOUNT}:vpc/{network}"}
            return allowed(Request(machine, f"ec2:{action}", interface, where | more))

        assert may(vpc)
        assert not may("vpc-of-others")
    if action == "CreateTags":
        assert may("vpc-of-others", **{"ec2:createaction": "CreateNetworkInterface"})


def test_the_secret_of_slurms_accounting_can_be_read(tmp_path: Path) -> None:
    secret = f"arn:aws:secretsmanager:us-west-2:{ACCOUNT}:secret:slurm-AbCdEf"
    accounting = {"endpoint": "db.example.com", "secret_arn": secret}
    config = deployment(SLURM, slurm__accounting=accounting, continuous_provisioning=True)
    account = Account(synthesise(config, tmp_path))
    machine = account.role(account.output("ExecutionRoleArn"), MANAGED)
    assert allowed(Request(machine, "secretsmanager:GetSecretValue", secret, {}))
    assert not allowed(Request(machine, "secretsmanager:GetSecretValue", secret.replace("slurm", "other"), {}))
    services = [one.get("ServiceName") for _, _, one in account.of_kind("AWS::EC2::VPCEndpoint")]
    assert "com.amazonaws.us-west-2.secretsmanager" in services
