"""A HyperPod cluster and what is around it, as CloudFormation: one stack a part. Reads ClusterConfig."""

from hyperpod_cdk.build import build

__all__ = ["build"]
