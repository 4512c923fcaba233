"""Creates the IAM roles of machines, of HyperPod itself, and of the pods of jobs.

A pod of a job can read training data, and write below the checkpoint folders of its own job. Machines of EKS clusters
cannot access checkpoints. Machines of Slurm clusters can access checkpoints, because jobs on Slurm run with the role of
their machine.
"""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_eks as eks
from aws_cdk import aws_iam as iam

from hyperpod_cdk.acknowledgements import accept_managed_policy, allow
from hyperpod_cdk.eks import Eks
from hyperpod_cdk.keys import KeyGrant, bucket_keys, disk_keys, machine_keys, own_groups
from hyperpod_cdk.network import SubnetPlacement
from hyperpod_cdk.stack_base import StackBase, managed_policy
from hyperpod_cdk.storage import EPHEMERAL, JOBS, MILESTONES, Stored
from hyperpod_ext.config.clusters.infrastructure import JobRole

_OBJECT_ACTIONS = [
    *("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"),
]
_UNRESTRICTED = "AWS cannot restrict descriptions of networks, and logins to ECR, to single resources"
_GRANTS = [
    *("CreateGrant", "Decrypt", "DescribeKey", "GenerateDataKeyWithoutPlaintext"),
    *("ReEncryptTo", "ReEncryptFrom", "RetireGrant"),
]


def machine_role(stack: StackBase, places: SubnetPlacement, stored: Stored, cluster: Eks | None) -> iam.Role:
    """Create the role of the cluster's machines."""
    policy = managed_policy("AmazonSageMakerClusterInstanceRolePolicy")
    role = iam.Role(
        stack,
        "MachineRole",
        description=f"Machines of HyperPod cluster {stack.config.name}",
        assumed_by=iam.ServicePrincipal("sagemaker.amazonaws.com"),
        managed_policies=[iam.ManagedPolicy.from_managed_policy_arn(stack, "MachinePolicy", policy)],
    )
    accept_managed_policy(role, policy, "HyperPod requires this policy, and AWS keeps it current")
    _use_interfaces(role, stack, places)
    _pull_images(role, stack)
    _use_key(role, "Key", KeyGrant(stored.key.key_arn))
    for place, key in enumerate(machine_keys(stack), 1):
        _use_key(role, f"OwnKey{place}", key)
    _read_scripts(role, stack)
    if (slurm := stack.config.slurm) is not None and slurm.accounting is not None:
        actions = ["secretsmanager:GetSecretValue", "secretsmanager:DescribeSecret"]
        allow(role, sid="AccountingSecret", actions=actions, resources=[slurm.accounting.secret_arn])
    if cluster is not None:
        allow(role, sid="PodIdentity", actions=["eks-auth:AssumeRoleForPodIdentity"], resources=[cluster.arn])
    else:
        _use_checkpoints(role, stored, "*")
        _read_data(role, stored)
    return role


def hyperpod_role(stack: StackBase, stored: Stored) -> iam.Role:
    """Create the role with which HyperPod adds and removes machines for Karpenter."""
    role = iam.Role(
        stack,
        "HyperPodRole",
        description=f"HyperPod adds and removes machines of {stack.config.name}",
        assumed_by=iam.ServicePrincipal("hyperpod.sagemaker.amazonaws.com"),
    )
    allow(
        role,
        "a cluster's ARN has an id that is unknown before the cluster exists",
        sid="Machines",
        actions=["sagemaker:BatchAddClusterNodes", "sagemaker:BatchDeleteClusterNodes"],
        resources=[stack.arn_of("sagemaker", "cluster/*")],
    )
    for place, key in enumerate((KeyGrant(stored.key.key_arn), *disk_keys(stack, stack.config))):
        allow(
            role,
            key.why,
            sid=f"Disks{place or ''}",
            actions=["kms:CreateGrant", "kms:DescribeKey"],
            resources=[key.resource],
            conditions=key.conditions
            | {
                "StringLike": {"kms:ViaService": "sagemaker.*.amazonaws.com"},
                "Bool": {"kms:GrantIsForAWSResource": "true"},
                "ForAllValues:StringEquals": {"kms:GrantOperations": _GRANTS},
            },
        )
    return role


def pod_role(stack: StackBase, name: str, wanted: JobRole, stored: Stored, cluster: Eks) -> iam.Role:
    """Create the IAM role for the pods of one service account, and the association of the role with the service
    account."""
    trusted = iam.ServicePrincipal(
        "pods.eks.amazonaws.com",
        conditions={
            "StringEquals": {
                "aws:SourceAccount": stack.account,
                "aws:RequestTag/eks-cluster-name": cluster.name,
                "aws:RequestTag/kubernetes-namespace": wanted.namespace,
                "aws:RequestTag/kubernetes-service-account": wanted.service_account,
            }
        },
    ).with_session_tags()
    about = f"Pods of {wanted.service_account} in {wanted.namespace}: checkpoints of {wanted.jobs}"
    role = iam.Role(stack, name, description=about.replace("*", "..."), assumed_by=trusted)
    _use_checkpoints(role, stored, wanted.jobs)
    _read_data(role, stored)
    for place, key in enumerate((KeyGrant(stored.key.key_arn), *bucket_keys(stack, "checkpoints", "data"))):
        allow(
            role,
            key.why,
            sid=f"KeyForS3{place or ''}",
            actions=["kms:Decrypt", "kms:GenerateDataKey"],
            resources=[key.resource],
            conditions=key.conditions | {"StringEquals": {"kms:ViaService": f"s3.{stack.region}.{cdk.Aws.URL_SUFFIX}"}},
        )
    tier = stack.config.tiered_storage
    if tier is not None and tier.enabled:
        why = "CloudWatch cannot restrict metrics to single resources"
        allow(role, why, sid="TierMetrics", actions=["cloudwatch:PutMetricData"], resources=["*"])
    eks.CfnPodIdentityAssociation(
        stack,
        f"{name}Association",
        cluster_name=cluster.name,
        namespace=wanted.namespace,
        service_account=wanted.service_account,
        role_arn=role.role_arn,
    )
    return role


def _use_checkpoints(role: iam.Role, stored: Stored, jobs: str) -> None:
    folders = [f"{folder}/{jobs}" for folder in (JOBS, EPHEMERAL, MILESTONES)]
    allow(
        role,
        "all objects below the folders of the role's own jobs",
        sid="OwnCheckpoints",
        actions=_OBJECT_ACTIONS,
        resources=[stored.checkpoints.below(f"{folder}/*") for folder in folders],
    )
    allow(
        role,
        sid="ListOwnCheckpoints",
        actions=["s3:ListBucket"],
        resources=[stored.checkpoints.arn],
        conditions={"StringLike": {"s3:prefix": [f"{folder}/*" for folder in folders]}},
    )


def _read_data(role: iam.Role, stored: Stored) -> None:
    why = "all data in this bucket"
    allow(role, why, sid="ReadData", actions=["s3:GetObject"], resources=[stored.data.below("*")])
    allow(role, sid="ListData", actions=["s3:ListBucket"], resources=[stored.data.arn])


def _use_key(role: iam.Role, sid: str, key: KeyGrant) -> None:
    actions = ["kms:Decrypt", "kms:GenerateDataKey", "kms:DescribeKey"]
    allow(role, key.why, sid=sid, actions=actions, resources=[key.resource], conditions=key.conditions or None)
    allow(
        role,
        key.why,
        sid=f"{sid}ForDisks",
        actions=["kms:CreateGrant"],
        resources=[key.resource],
        conditions=key.conditions | {"Bool": {"kms:GrantIsForAWSResource": "true"}},
    )


def _read_scripts(role: iam.Role, stack: StackBase) -> None:
    """Allow `role` to read the groups' lifecycle scripts in buckets whose names do not begin with `sagemaker-`. AWS's
    managed policy covers buckets whose names begin with `sagemaker-`."""
    sources = {group.lifecycle.source for group in own_groups(stack.config) if group.lifecycle is not None}
    for place, source in enumerate(sorted(sources), 1):
        bucket, _, prefix = source.removeprefix("s3://").partition("/")
        if bucket.startswith("sagemaker-"):
            continue
        arn, below = f"arn:{cdk.Aws.PARTITION}:s3:::{bucket}", f"{prefix.rstrip('/')}/*".lstrip("/")
        why = "all scripts below the group's folder"
        allow(role, why, sid=f"Scripts{place}", actions=["s3:GetObject"], resources=[f"{arn}/{below}"])
        allow(role, sid=f"ListScripts{place}", actions=["s3:ListBucket"], resources=[arn])


def _pull_images(role: iam.Role, stack: StackBase) -> None:
    allow(role, _UNRESTRICTED, sid="EcrLogin", actions=["ecr:GetAuthorizationToken"], resources=["*"])
    allow(
        role,
        "AWS's training images are in other accounts and regions; the repository's policy decides",
        sid="EcrPull",
        actions=["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"],
        resources=[stack.arn_of("ecr", "repository/*", anywhere=True)],
    )


def _use_interfaces(role: iam.Role, stack: StackBase, places: SubnetPlacement) -> None:
    """Allow machines and the VPC CNI plugin to manage network interfaces, but only in the subnets and security groups
    of the cluster."""
    new = "interfaces of machines that do not exist yet"
    groups = [stack.arn_of("ec2", f"security-group/{group}") for group in places.all_security_groups]
    interfaces, machines = stack.arn_of("ec2", "network-interface/*"), stack.arn_of("ec2", "instance/*")
    ours = {"ArnEquals": {"ec2:Vpc": stack.arn_of("ec2", f"vpc/{places.vpc_id}")}}
    described = (
        *("DhcpOptions", "InstanceTypes", "Instances", "NetworkInterfaces"),
        *("SecurityGroups", "Subnets", "Tags", "Vpcs"),
    )
    allow(
        role,
        _UNRESTRICTED,
        sid="DescribeNetwork",
        actions=[f"ec2:Describe{what}" for what in described],
        resources=["*"],
    )
    allow(
        role,
        new,
        sid="CreateInterfaces",
        actions=["ec2:CreateNetworkInterface"],
        resources=[
            interfaces,
            *groups,
            *(stack.arn_of("ec2", f"subnet/{subnet}") for subnet in places.all_machine_subnets),
        ],
    )
    used = [
        *("ec2:AssignPrivateIpAddresses", "ec2:UnassignPrivateIpAddresses"),
        *("ec2:AttachNetworkInterface", "ec2:DetachNetworkInterface", "ec2:DeleteNetworkInterface"),
        *("ec2:CreateNetworkInterfacePermission", "ec2:DeleteNetworkInterfacePermission"),
        "ec2:ModifyNetworkInterfaceAttribute",
    ]
    allow(role, new, sid="UseInterfaces", actions=used, resources=[interfaces], conditions=ours)
    attached = ["ec2:AttachNetworkInterface", "ec2:DetachNetworkInterface", "ec2:ModifyNetworkInterfaceAttribute"]
    allow(role, new, sid="AttachInterfaces", actions=attached, resources=[machines, *groups])
    allow(role, new, sid="TagInterfaces", actions=["ec2:CreateTags"], resources=[interfaces], conditions=ours)
    allow(
        role,
        new,
        sid="TagNewInterfaces",
        actions=["ec2:CreateTags"],
        resources=[interfaces],
        conditions={"StringEquals": {"ec2:CreateAction": "CreateNetworkInterface"}},
    )
