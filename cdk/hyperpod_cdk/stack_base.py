"""Base class of all stacks, which sets account, region, name, tags and outputs."""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct

from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.clusters.infrastructure import Infrastructure


class StackBase(cdk.Stack):
    """Base class for a stack of a cluster. The stack's name is `CLUSTER-PART`. The synthesis of the stack sends no
    requests to AWS.

    Args:
        part: last part of the stack's name, such as `network`.
        about: description of the content of the stack.
        kept: whether the stack is protected against deletion.
    """

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
        """Add an output to the stack, unless `value` is None. `hp-ext` reads outputs after a deployment."""
        if value is not None:
            cdk.CfnOutput(self, name, value=value, description=about)

    def arn_of(self, service: str, resource: str, *, anywhere: bool = False) -> str:
        """Return the ARN of a resource in the account and region of the stack. With `anywhere`, the ARN matches all
        accounts and regions."""
        region, account = ("*", "*") if anywhere else (self.region, self.account)
        return f"arn:{cdk.Aws.PARTITION}:{service}:{region}:{account}:{resource}"


def managed_policy(name: str) -> str:
    """Return the ARN of the AWS managed policy with the name `name`."""
    return f"arn:{cdk.Aws.PARTITION}:iam::aws:policy/{name}"
