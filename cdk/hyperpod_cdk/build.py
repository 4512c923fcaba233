"""Builds the CloudFormation stacks of one cluster, and sets the dependencies between the stacks."""

from __future__ import annotations

import aws_cdk as cdk

from hyperpod_cdk.addons import AddonsStack, has_addons
from hyperpod_cdk.cluster import ClusterStack
from hyperpod_cdk.eks import EksStack, existing_eks
from hyperpod_cdk.network import NetworkStack, existing_places
from hyperpod_cdk.observability import ObservabilityStack
from hyperpod_cdk.stack_base import StackBase
from hyperpod_cdk.storage import StorageStack
from hyperpod_ext.config.clusters.cluster import ClusterConfig


def build(app: cdk.App, config: ClusterConfig, *, scale: bool = False) -> dict[str, StackBase]:
    """Return the stacks of a cluster by their short names, such as `network`, in the order of deployment.

    Args:
        config: spec of the cluster. `deployment.problems` must find no problem in the spec.
        scale: whether groups have the numbers of machines in the spec. False: every group has 0 machines, and the
            stacks whose pods need nodes (`addons`, `observability`) are left out.
    """
    made = config.infrastructure
    assert made is not None, "deployment.problems refuses such a cluster"
    stacks: dict[str, StackBase] = {}
    if made.network.vpc_id is None:
        stacks["network"] = network = NetworkStack(app, config)
        places = network.places
    else:
        places = existing_places(config)
    stacks["storage"] = storage = StorageStack(app, config, places)
    cluster = None
    if config.orchestrator == "eks":
        if config.eks_cluster_arn is None:
            stacks["eks"] = made_here = EksStack(app, config, places, storage.stored.key)
            cluster = made_here.eks
        else:
            cluster = existing_eks(config)
    stacks["cluster"] = machines = ClusterStack(app, config, places, storage.stored, cluster, scale=scale)
    if "eks" in stacks:
        machines.add_stack_dependency(stacks["eks"])
    there = scale and any(group.count for group in (*config.instance_groups, *config.restricted_groups))
    if cluster is not None and there:
        if has_addons(config):
            stacks["addons"] = AddonsStack(app, config, cluster, machines.arn)
        if made.add_ons.observability is not None:
            stacks["observability"] = ObservabilityStack(app, config, cluster, made.add_ons.observability)
        for part in stacks.keys() & {"addons", "observability"}:
            stacks[part].add_stack_dependency(machines)
    return stacks
