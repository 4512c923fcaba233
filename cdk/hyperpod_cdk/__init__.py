"""Builds the CloudFormation stacks of a HyperPod cluster from a ClusterConfig: network, storage, EKS and add-ons."""

from hyperpod_cdk.build import build

__all__ = ["build"]
