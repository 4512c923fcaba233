"""Stack for metrics of nodes and jobs: a workspace of Amazon Managed Prometheus, and AWS's add-on that sends metrics to
the workspace."""

from __future__ import annotations

from aws_cdk import aws_aps as aps
from aws_cdk import aws_eks as eks
from aws_cdk import aws_iam as iam
from constructs import Construct

from hyperpod_cdk.acknowledgements import allow
from hyperpod_cdk.eks import Eks
from hyperpod_cdk.stack_base import StackBase
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.clusters.infrastructure import Observability

_ADDON = "amazon-sagemaker-hyperpod-observability"
_ACCOUNT = "hyperpod-observability-operator-otel-collector"
_MEASURED = ("trainingMetrics", "nodeMetrics", "acceleratedComputeMetrics")


class ObservabilityStack(StackBase):
    """Stack with the observability add-on, whose role may only write metrics to one workspace and logs to
    CloudWatch."""

    def __init__(self, scope: Construct, config: ClusterConfig, cluster: Eks, wanted: Observability) -> None:
        super().__init__(scope, config, "observability", "its metrics")
        if wanted.workspace_arn is None:
            workspace = aps.CfnWorkspace(self, "Workspace", alias=config.name)
            arn, endpoint = workspace.attr_arn, workspace.attr_prometheus_endpoint
        else:
            arn = wanted.workspace_arn
            region, workspace_id = arn.split(":")[3], arn.rpartition("/")[2]
            endpoint = f"https://aps-workspaces.{region}.amazonaws.com/workspaces/{workspace_id}/"
        role = iam.Role(self, "Role", assumed_by=iam.ServicePrincipal("pods.eks.amazonaws.com").with_session_tags())
        allow(role, sid="Metrics", actions=["aps:RemoteWrite"], resources=[arn])
        allow(
            role,
            "the add-on creates log groups below this one",
            sid="Logs",
            actions=[
                *("logs:CreateLogGroup", "logs:CreateLogStream", "logs:PutLogEvents"),
                *("logs:DescribeLogGroups", "logs:DescribeLogStreams", "logs:PutRetentionPolicy"),
            ],
            resources=[self.arn_of("logs", "log-group:/aws/sagemaker/Clusters/*")],
        )
        configuration = {
            "ampWorkspace": {"arn": arn, "prometheusEndpoint": endpoint},
            "metricsProvider": {name: {"level": wanted.level} for name in _MEASURED},
        }
        eks.CfnAddon(
            self,
            "Addon",
            addon_name=_ADDON,
            cluster_name=cluster.name,
            resolve_conflicts="OVERWRITE",
            configuration_values=self.to_json_string(configuration),
            pod_identity_associations=[
                eks.CfnAddon.PodIdentityAssociationProperty(role_arn=role.role_arn, service_account=_ACCOUNT)
            ],
        )
        self.output("PrometheusWorkspaceArn", arn, "Workspace that holds the metrics")
