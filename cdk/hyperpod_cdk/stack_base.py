"""Base of all stacks: account, region, name, tags and outputs."""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct

from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.clusters.infrastructure import Infrastructure


class StackBase(cdk.Stack):
    """One stack of a cluster, `NAME-part`. The synthesis of a stack sends no requests to AWS."""

    def __init__(self, scope: Construct, config: ClusterConfig, part: str, about: str, *, kept: bool = False) -> None:
        assert config.infrastructure is not None, "deployment.problems refuses such a cluster"
        self.config: ClusterConfig = config
        self.made: Infrastructure = config.infrastructure
        super().__init__(
            scope,
            f"{config.name}-{part}",
            env=cdk.Environment(account=self.made.account, region=config.region),
            description=f"HyperPod cluster {config.name}: {about}",
            termination_protection=kept,
        )
        for key, value in config.tags.items():
            cdk.Tags.of(self).add(key, value)

    def output(self, name: str, value: str | None, about: str) -> None:
        """Add an output that `hp-ext` reads after a deployment, unless `value` is None."""
        if value is not None:
            cdk.CfnOutput(self, name, value=value, description=about)

    def arn_of(self, service: str, resource: str, *, anywhere: bool = False) -> str:
        """Return an ARN in this account and region, or in any."""
        region, account = ("*", "*") if anywhere else (self.region, self.account)
        return f"arn:{cdk.Aws.PARTITION}:{service}:{region}:{account}:{resource}"


def managed_policy(name: str) -> str:
    """Return the ARN of a policy that AWS manages."""
    return f"arn:{cdk.Aws.PARTITION}:iam::aws:policy/{name}"
