"""Stack with the HyperPod cluster. The properties of the cluster resource are equal to the CreateCluster request that
`hp-ext cluster create` would send."""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct

from hyperpod_cdk import identity
from hyperpod_cdk.acknowledgements import accept
from hyperpod_cdk.eks import Eks
from hyperpod_cdk.network import SubnetPlacement
from hyperpod_cdk.stack_base import StackBase
from hyperpod_cdk.storage import LIFECYCLE, Stored
from hyperpod_ext.clusters.bindings import Bindings, bound
from hyperpod_ext.clusters.request import create_cluster_request
from hyperpod_ext.config.clusters.cluster import ClusterConfig

LIFECYCLE_SCRIPT = "on_init_complete.sh"


class ClusterStack(StackBase):
    """Stack with the HyperPod cluster, the roles of its machines, and on EKS the roles of pods."""

    def __init__(
        self,
        scope: Construct,
        config: ClusterConfig,
        places: SubnetPlacement,
        stored: Stored,
        eks: Eks | None,
        *,
        scale: bool,
    ) -> None:
        super().__init__(scope, config, "cluster", "roles and machines")
        role = config.execution_role or identity.machine_role(self, places, stored, eks).role_arn
        scaling = config.auto_scaling is not None and config.auto_scaling.enabled and config.cluster_role is None
        slurm = config.orchestrator == "slurm"
        self.bindings = Bindings(
            subnets=places.machine_subnets,
            security_groups=places.security_groups,
            group_subnets=places.group_subnets,
            execution_role=role,
            cluster_role=identity.hyperpod_role(self, stored).role_arn if scaling else None,
            eks_cluster_arn=eks.arn if eks is not None else None,
            mount=stored.mount if slurm else None,
            lifecycle_source=f"s3://{stored.lifecycle.bucket_name}/{LIFECYCLE}" if stored.lifecycle else None,
            lifecycle_script=LIFECYCLE_SCRIPT if stored.lifecycle else None,
        )
        request = create_cluster_request(bound(config, self.bindings, scale=scale))
        # an untyped CfnResource, because typed constructs refuse dictionaries and accept wrong values; the request was
        # already checked against AWS's API model
        self.cluster = cdk.CfnResource(self, "Cluster", type="AWS::SageMaker::Cluster", properties=request)
        self._accept_what_is_newer()
        for child in self.node.find_all():
            if isinstance(child, cdk.CfnResource) and child.cfn_resource_type == "AWS::IAM::Policy":
                # make the IAM policy an explicit dependency, because no property of the cluster refers to the policy
                self.cluster.add_resource_dependency(child)
        arn = self.cluster.get_att("ClusterArn")
        # always export the ARN, even without machines: an existing stack may import the ARN, and CloudFormation refuses
        # to remove an export that is in use
        self.arn = str(self.export_value(arn)) if eks is not None else arn.to_string()
        self._pods(stored, eks)
        self.output("ClusterName", config.name, "The HyperPod cluster")
        self.output("ClusterArn", arn.to_string(), "ARN of the HyperPod cluster")
        self.output("ExecutionRoleArn", role, "Role of the cluster's machines")
        self.output("SubnetIds", ",".join(request["VpcConfig"]["Subnets"]), "Subnets of the cluster's machines")
        self.output(
            "SecurityGroupIds",
            ",".join(request["VpcConfig"]["SecurityGroupIds"]),
            "Security groups of the cluster's machines",
        )
        self.output("EksClusterName", eks and eks.name, "The EKS cluster that the machines join")

    def _accept_what_is_newer(self) -> None:
        """Acknowledge findings about properties that are newer than the CDK validator's schemas. cfn-lint, whose
        schemas are newer, checks these properties."""
        groups = self.config.instance_groups
        if any(group.image_release for group in groups):
            accept(
                self.cluster, "CloudFormation-Validate::F3002", "the validator's schema has no ImageReleaseVersion yet"
            )
        if any(group.image == "default" for group in groups):
            accept(self.cluster, "CloudFormation-Validate::E1152", "ImageId of HyperPod accepts the word default")

    def _pods(self, stored: Stored, eks: Eks | None) -> None:
        if eks is None:
            return
        roles = [
            identity.pod_role(self, f"JobRole{place}", wanted, stored, eks)
            for place, wanted in enumerate(self.made.job_roles, 1)
        ]
        self.output("JobRoleArn", roles[0].role_arn if roles else None, "Role of pods of the first service account")
        if len(roles) > 1:
            self.output(
                "JobRoleArns", ",".join(role.role_arn for role in roles), "Roles of pods, in the order of the spec"
            )
        governance = self.made.add_ons.task_governance
        teams = [f"hyperpod-ns-{team.name}" for team in (governance.teams if governance else ())]
        namespace = next((one.namespace for one in self.made.job_roles), next(iter(teams), None))
        self.output("Namespace", namespace, "Default namespace of jobs")
        self.output(
            "ServiceAccount",
            self.made.job_roles[0].service_account if roles else None,
            "Default service account of jobs",
        )
        queue = f"{namespace}-localqueue" if namespace in teams else None
        self.output(
            "QueueName", queue, "Queue of the default namespace, with the name that AWS's task governance gives it"
        )
