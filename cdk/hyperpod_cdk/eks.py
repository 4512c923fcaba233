"""Stack with the EKS control plane, and with the EKS add-ons that machines need before they join the cluster."""

from __future__ import annotations

from dataclasses import dataclass

import aws_cdk as cdk
from aws_cdk import aws_eks as eks
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from constructs import Construct

from hyperpod_cdk.acknowledgements import accept_managed_policy, accept_nag
from hyperpod_cdk.network import SubnetPlacement
from hyperpod_cdk.stack_base import StackBase, managed_policy
from hyperpod_ext.config.clusters.cluster import ClusterConfig

_LOGS = ("api", "audit", "authenticator", "controllerManager", "scheduler")
_BEFORE_NODES = ("vpc-cni", "kube-proxy", "eks-pod-identity-agent")
"""Add-ons that run one pod on each node, which CloudFormation can install before the cluster has nodes."""


@dataclass(frozen=True)
class Eks:
    """Name and ARN of a new or existing EKS cluster."""

    name: str
    arn: str


def existing_eks(config: ClusterConfig) -> Eks:
    """Return name and ARN of the existing EKS cluster in `config.eks_cluster_arn`."""
    arn = str(config.eks_cluster_arn)
    return Eks(name=arn.rpartition("/")[2], arn=arn)


class EksStack(StackBase):
    """Stack with the EKS control plane. Kubernetes Secrets are encrypted with the cluster's KMS key. The API is
    reachable only from inside the VPC, unless `infrastructure.eks.public_access` allows IP ranges."""

    def __init__(self, scope: Construct, config: ClusterConfig, places: SubnetPlacement, key: kms.IKey) -> None:
        super().__init__(scope, config, "eks", "EKS control plane")
        wanted = self.made.eks
        # create the log group here, because EKS would create a log group that keeps logs for ever
        log_group = logs.CfnLogGroup(
            self, "Logs", log_group_name=f"/aws/eks/{config.name}/cluster", retention_in_days=wanted.log_days
        )
        role = iam.CfnRole(
            self,
            "Role",
            assume_role_policy_document=_trusts("eks.amazonaws.com"),
            managed_policy_arns=[managed_policy("AmazonEKSClusterPolicy")],
            policies=[iam.CfnRole.PolicyProperty(policy_name="secrets", policy_document=_uses(key.key_arn))],
        )
        accept_managed_policy(
            role, managed_policy("AmazonEKSClusterPolicy"), "EKS requires this policy, and AWS keeps it current"
        )
        cluster = eks.CfnCluster(
            self,
            "Eks",
            name=config.name,
            version=wanted.version,
            role_arn=role.attr_arn,
            access_config=eks.CfnCluster.AccessConfigProperty(
                # HyperPod creates an EKS access entry, which needs an authentication mode that includes API
                authentication_mode="API_AND_CONFIG_MAP",
                bootstrap_cluster_creator_admin_permissions=True,
            ),
            bootstrap_self_managed_addons=False,
            encryption_config=[
                eks.CfnCluster.EncryptionConfigProperty(
                    provider=eks.CfnCluster.ProviderProperty(key_arn=key.key_arn), resources=["secrets"]
                )
            ],
            kubernetes_network_config=eks.CfnCluster.KubernetesNetworkConfigProperty(
                service_ipv4_cidr=wanted.service_cidr
            ),
            logging=eks.CfnCluster.LoggingProperty(
                cluster_logging=eks.CfnCluster.ClusterLoggingProperty(
                    enabled_types=[eks.CfnCluster.LoggingTypeConfigProperty(type=one) for one in _LOGS]
                )
            ),
            resources_vpc_config=eks.CfnCluster.ResourcesVpcConfigProperty(
                subnet_ids=list(places.control_subnets),
                security_group_ids=list(places.security_groups),
                endpoint_private_access=True,
                endpoint_public_access=bool(wanted.public_access),
                public_access_cidrs=list(wanted.public_access) or None,
            ),
            # AWS's IAM policy for the training operator needs this tag on the EKS cluster
            tags=[cdk.CfnTag(key="SageMaker", value="true")],
        )
        cluster.add_resource_dependency(log_group)
        if wanted.public_access:
            reached = f"reachable over the internet only from {', '.join(wanted.public_access)}, as the spec says"
            accept_nag(cluster, "EKS1", reached)
        for name in _BEFORE_NODES:
            eks.CfnAddon(
                self,
                "".join(part.capitalize() for part in name.split("-")),
                addon_name=name,
                cluster_name=cluster.ref,
                resolve_conflicts="OVERWRITE",
            )
        for place, admin in enumerate(wanted.admins, 1):
            eks.CfnAccessEntry(
                self,
                f"Admin{place}",
                cluster_name=cluster.ref,
                principal_arn=admin,
                access_policies=[
                    eks.CfnAccessEntry.AccessPolicyProperty(
                        policy_arn=f"arn:{cdk.Aws.PARTITION}:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy",
                        access_scope=eks.CfnAccessEntry.AccessScopeProperty(type="cluster"),
                    )
                ],
            )
        self.eks = Eks(name=cluster.ref, arn=cluster.attr_arn)
        self.output("EksClusterArn", cluster.attr_arn, "The EKS cluster")


def _uses(key: str) -> dict[str, object]:
    actions = ["kms:Encrypt", "kms:Decrypt", "kms:ListGrants", "kms:DescribeKey"]
    return {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": actions, "Resource": key}]}


def _trusts(service: str) -> dict[str, object]:
    statement = {"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}
    return {"Version": "2012-10-17", "Statement": [statement]}
