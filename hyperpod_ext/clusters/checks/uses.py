"""Checks for settings that machines do not support, and for machines that no job would use."""

from __future__ import annotations

from collections.abc import Iterator

from hyperpod_ext.catalog.instances import instance
from hyperpod_ext.clusters.checks import check, groups_of
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.errors import Problem


@check(
    "HPX217",
    "error",
    "EFA on machines without EFA interfaces",
    "network_interface sets how EFA interfaces are used. Machines without EFA interfaces cannot start with this "
    "setting. On machines without EFA, jobs with several nodes are slow.",
    "Remove network_interface, or use a type with EFA (see `hp-ext instances`).",
)
def efa_is_there(cluster: ClusterConfig) -> Iterator[Problem]:
    for index, group in enumerate(cluster.instance_groups):
        machine = instance(group.instance_type)
        if group.network_interface is not None and machine is not None and machine.efa == 0:
            message = f"is only valid for instance types with EFA, and {group.instance_type} has no EFA"
            hint = "remove network_interface, or use a type with EFA"
            yield Problem(message, path=f"instance_groups.{index}.network_interface", hint=hint)


@check(
    "HPX230",
    "warning",
    "unknown facts of an instance type",
    "AWS's public sources do not state the EFA interfaces, network or local disks of this instance type. Checks of IP "
    "addresses, EFA and disks are then skipped.",
    "See `aws ec2 describe-instance-types`. Leave room in the subnets, because each EFA interface needs an IP address.",
)
def facts_are_known(cluster: ClusterConfig) -> Iterator[Problem]:
    for index, group in enumerate(cluster.instance_groups):
        machine = instance(group.instance_type)
        if machine is not None and machine.unknown:
            message = f"{group.instance_type}: the catalog lacks {', '.join(machine.unknown)}"
            hint = "see `aws ec2 describe-instance-types`"
            yield Problem(message, path=f"instance_groups.{index}.instance_type", hint=hint)


@check(
    "HPX218",
    "error",
    "two file systems with the same path",
    "Each machine mounts its file systems when it starts. If two have the same path, the second mount fails or hides "
    "the first one, and jobs write to the wrong file system.",
    "Give each file system a different path.",
)
def file_systems_have_places(cluster: ClusterConfig) -> Iterator[Problem]:
    for where, group in groups_of(cluster):
        present: dict[str, int] = {}
        for index, storage in enumerate(group.storage):
            if storage.kind == "ebs":
                continue
            default = "/fsx" if storage.kind == "fsx-lustre" else "HyperPod's default path"
            place = storage.path.rstrip("/") if storage.path else default
            first = present.setdefault(place, index)
            if first != index:
                field = "path" if storage.path else "kind"
                message = f"storage.{first} of the group has the same path, {place}"
                yield Problem(message, path=f"{where}.storage.{index}.{field}", hint="choose another path")


@check(
    "HPX219",
    "error",
    "spares without other machines",
    "Spares get no ranks until another machine fails. If all machines are spares, no job can start on the cluster.",
    "Lower spares, or raise count.",
)
def some_machines_work(cluster: ClusterConfig) -> Iterator[Problem]:
    if cluster.working_nodes == 0 and not cluster.restricted_groups:
        for index, group in enumerate(cluster.instance_groups):
            if group.spares:
                message = f"all {group.count} machines are spares, and no other group has machines"
                yield Problem(message, path=f"instance_groups.{index}.spares", hint=f"write at most {group.count - 1}")
                return


@check(
    "HPX223",
    "warning",
    "idle_s without effect",
    "Only the strategies WhenIdle and WhenAllIdle use idle_s. DrainFirst does not wait for idle nodes.",
    "Remove idle_s, or use another strategy.",
)
def idle_time_is_used(cluster: ClusterConfig) -> Iterator[Problem]:
    for index, group in enumerate(cluster.instance_groups):
        patch = group.auto_patch
        if patch is not None and patch.strategy == "DrainFirst" and patch.idle_s is not None:
            path = f"instance_groups.{index}.auto_patch.idle_s"
            yield Problem("has no effect with strategy DrainFirst", path=path, hint="remove it")


@check(
    "HPX220",
    "warning",
    "accelerators on nodes without jobs",
    "Slurm runs no jobs on controller and login nodes. Accelerators of these nodes are idle, and cost money.",
    "Use a type without accelerators for this group, such as ml.m5.4xlarge.",
)
def accelerators_compute(cluster: ClusterConfig) -> Iterator[Problem]:
    for index, group in enumerate(cluster.instance_groups):
        machine = instance(group.instance_type)
        if group.slurm and group.slurm.node_type != "Compute" and machine is not None and machine.accelerators:
            message = f"{group.instance_type} has {machine.accelerators} accelerators, but the group runs no jobs"
            hint = "use a type without accelerators"
            yield Problem(message, path=f"instance_groups.{index}.instance_type", hint=hint)


@check(
    "HPX221",
    "warning",
    "other_types that cannot replace instance_type",
    "A job has the same number of workers on each node. HyperPod may start machines of other_types with another number "
    "of accelerators. A job cannot use such a machine, or leaves some of its accelerators idle.",
    "List only types with the same number and kind of accelerators in other_types, or make a group for each type.",
)
def other_types_are_as_large(cluster: ClusterConfig) -> Iterator[Problem]:
    for index, group in enumerate(cluster.instance_groups):
        first = instance(group.instance_type)
        for at, name in enumerate(group.other_types):
            other = instance(name)
            if first is None or other is None or first.accelerators == other.accelerators:
                continue
            message = (
                f"{name} has {other.accelerators} accelerators, but {group.instance_type} has {first.accelerators}"
            )
            yield Problem(
                message, path=f"instance_groups.{index}.other_types.{at}", hint="make a separate group for it"
            )
