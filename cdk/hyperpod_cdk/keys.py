"""KMS keys that the cluster's spec names, in the form that statements in IAM policies need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hyperpod_cdk.stack_base import StackBase
from hyperpod_ext.config.clusters.cluster import ClusterConfig, InstanceGroup
from hyperpod_ext.config.clusters.cluster_parts import RestrictedGroup


@dataclass(frozen=True)
class KeyGrant:
    """A KMS key in a statement of an IAM policy."""

    resource: str
    conditions: dict[str, Any] = field(default_factory=dict)
    """Conditions of the IAM statement that select the key if `resource` also covers other keys."""
    why: str = ""
    """Reason for a wildcard in `resource`."""


def own_groups(config: ClusterConfig) -> Iterator[InstanceGroup]:
    """Return the groups without an `execution_role`, whose machines have the role that this stack creates."""
    return (group for group in config.instance_groups if group.execution_role is None)


def disk_keys(stack: StackBase, config: ClusterConfig) -> list[KeyGrant]:
    """Return the keys that encrypt the disks of groups without an `execution_role`."""
    restricted: Iterator[RestrictedGroup] = (one for one in config.restricted_groups if one.execution_role is None)
    disks = [disk for group in (*own_groups(config), *restricted) for disk in group.storage if disk.kind == "ebs"]
    return [_grant(stack, name) for name in sorted({disk.kms_key for disk in disks if disk.kms_key})]


def bucket_keys(stack: StackBase, *buckets: str) -> list[KeyGrant]:
    """Return the keys that encrypt existing buckets.

    Args:
        buckets: names of fields in `infrastructure.buckets`, such as `data`.
    """
    keys = {getattr(stack.made.buckets, name).kms_key for name in buckets}
    return [_grant(stack, name) for name in sorted(key for key in keys if key)]


def machine_keys(stack: StackBase) -> list[KeyGrant]:
    """Return the keys that machines need for their disks and lifecycle scripts, and on Slurm also for checkpoints and
    data."""
    of_jobs = ("checkpoints", "data") if stack.config.orchestrator == "slurm" else ()
    found = (*disk_keys(stack, stack.config), *bucket_keys(stack, "lifecycle", *of_jobs))
    return list({(one.resource, str(one.conditions)): one for one in found}.values())


def _grant(stack: StackBase, name: str) -> KeyGrant:
    """Return the key with the ARN, id or alias `name`. For an alias, the grant's `resource` covers all keys, and a
    condition selects the key with the alias, because IAM supports aliases only in conditions."""
    alias = name.partition("alias/")[2]
    if not alias:
        return KeyGrant(name if name.startswith("arn:") else stack.arn_of("kms", f"key/{name}"))
    place = name.partition(":alias/")[0] if name.startswith("arn:") else ""
    resource = f"{place}:key/*" if place else stack.arn_of("kms", "key/*")
    conditions = {"ForAnyValue:StringEquals": {"kms:ResourceAliases": f"alias/{alias}"}}
    return KeyGrant(resource, conditions, "IAM supports aliases only as a condition on keys")
