"""Stack with the EKS add-ons whose pods need nodes. Without nodes, these add-ons fail after 20 minutes."""

from __future__ import annotations

from collections.abc import Sequence

import aws_cdk as cdk
from aws_cdk import aws_eks as eks
from aws_cdk import aws_iam as iam
from constructs import Construct

from hyperpod_cdk.acknowledgements import accept, accept_managed_policy
from hyperpod_cdk.eks import Eks
from hyperpod_cdk.stack_base import StackBase, managed_policy
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.clusters.infrastructure import TaskGovernance

_OPERATOR = "amazon-sagemaker-hyperpod-training-operator"
_GOVERNANCE = "amazon-sagemaker-hyperpod-taskgovernance"


def has_addons(config: ClusterConfig) -> bool:
    """Return whether the stack would contain an add-on. CloudFormation refuses a stack without resources."""
    assert config.infrastructure is not None
    wanted = config.infrastructure.add_ons
    switches = (wanted.cert_manager, wanted.training_operator, wanted.task_governance)
    return config.eks_cluster_arn is None or config.infrastructure.file_system is not None or any(switches)


class AddonsStack(StackBase):
    """Stack with the add-ons that the spec selects, and with the quotas of teams."""

    def __init__(self, scope: Construct, config: ClusterConfig, cluster: Eks, cluster_arn: str) -> None:
        super().__init__(scope, config, "addons", "add-ons in EKS")
        self._eks = cluster
        wanted = self.made.add_ons
        if config.eks_cluster_arn is None:
            self._addon("CoreDns", "coredns")
        if self.made.file_system is not None:
            self._addon("FsxDriver", "aws-fsx-csi-driver")
        certificates = [self._addon("CertManager", "cert-manager")] if wanted.cert_manager else []
        if wanted.training_operator:
            self._addon("TrainingOperator", _OPERATOR, after=[*certificates, self._operator_role()])
        if wanted.task_governance is not None:
            self._govern(wanted.task_governance, cluster_arn)

    def _addon(self, name: str, addon: str, after: Sequence[cdk.CfnResource] = ()) -> eks.CfnAddon:
        made = eks.CfnAddon(self, name, addon_name=addon, cluster_name=self._eks.name, resolve_conflicts="OVERWRITE")
        for other in after:
            made.add_resource_dependency(other)
        return made

    def _operator_role(self) -> eks.CfnPodIdentityAssociation:
        """Create the IAM role of AWS's training operator, and the pod identity association of the role with the
        operator's service account. The association is a separate CloudFormation resource, because this add-on accepts
        no association in its own properties."""
        arn = managed_policy("AmazonSageMakerHyperPodTrainingOperatorAccess")
        role = iam.Role(
            self,
            "OperatorRole",
            assumed_by=iam.ServicePrincipal("pods.eks.amazonaws.com").with_session_tags(),
            managed_policies=[iam.ManagedPolicy.from_managed_policy_arn(self, "OperatorPolicy", arn)],
        )
        accept_managed_policy(role, arn, "AWS's operator requires this policy, which AWS updates with its releases")
        return eks.CfnPodIdentityAssociation(
            self,
            "OperatorIdentity",
            cluster_name=self._eks.name,
            namespace="aws-hyperpod",
            service_account="hp-training-operator-controller-manager",
            role_arn=role.role_arn,
        )

    def _govern(self, wanted: TaskGovernance, cluster_arn: str) -> None:
        addon = self._addon("TaskGovernance", _GOVERNANCE)
        policy = None
        if wanted.priorities:
            classes = [{"Name": one.name, "Weight": one.weight} for one in wanted.priorities]
            policy = self._resource(
                "Priorities",
                "AWS::SageMaker::ClusterSchedulerConfig",
                after=addon,
                Name=f"{self.config.name[:50]}-priorities",
                ClusterArn=cluster_arn,
                SchedulerConfig={
                    "PriorityClasses": classes,
                    "FairShare": "Enabled" if wanted.fair_share else "Disabled",
                },
            )
        for place, team in enumerate(wanted.teams, 1):
            quota = self._resource(
                f"Team{place}",
                "AWS::SageMaker::ComputeQuota",
                after=policy or addon,
                Name=team.name,
                ClusterArn=cluster_arn,
                ComputeQuotaConfig={
                    "ComputeQuotaResources": [{"InstanceType": team.instance_type, "Count": team.count}],
                    "ResourceSharingConfig": {"Strategy": team.sharing},
                },
                ComputeQuotaTarget={"TeamName": team.name, "FairShareWeight": team.weight},
            )
            accept(
                quota,
                "CloudFormation-Validate::F3006",
                "the type is newer than the validator's list; cfn-lint knows it",
            )

    def _resource(self, name: str, kind: str, after: cdk.CfnResource, **properties: object) -> cdk.CfnResource:
        """Create a resource from its CloudFormation type, because some CDK releases have no construct for the type."""
        made = cdk.CfnResource(self, name, type=kind, properties=properties)
        made.add_resource_dependency(after)
        return made
