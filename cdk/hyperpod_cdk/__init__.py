"""CloudFormation stacks of a HyperPod cluster, its network, storage, EKS and add-ons. Reads ClusterConfig."""

from hyperpod_cdk.build import build

__all__ = ["build"]
