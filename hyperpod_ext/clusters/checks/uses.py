"""Checks of settings that machines do not support, and of machines that no job would use."""

from __future__ import annotations

from collections.abc import Iterator

from hyperpod_ext.catalog.instances import instance
from hyperpod_ext.clusters.checks import check, groups_of
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.errors import Problem


@check(
    "HPX217",
    "error",
    "EFA on machines that have none",
    "network_interface says how EFA interfaces are used. Machines without one cannot be started so, or are not the "
    "machines that were meant: jobs of several nodes on them are slow.",
    "Remove network_interface, or take a type with EFA (`hp-ext instances`).",
)
def efa_is_there(cluster: ClusterConfig) -> Iterator[Problem]:
    for index, group in enumerate(cluster.instance_groups):
        machine = instance(group.instance_type)
        if group.network_interface is not None and machine is not None and machine.efa == 0:
            message = f"{group.instance_type} has no EFA interface"
            yield Problem(message, path=f"instance_groups.{index}.network_interface", hint="remove it")


@check(
    "HPX230",
    "warning",
    "facts of an instance type are unknown",
    "AWS's public sources do not say how many EFA interfaces, which network or which local disks machines of this type "
    "have. Addresses of subnets, EFA and disks are then not checked.",
    "Look at `aws ec2 describe-instance-types`, and leave room in the subnets: each EFA interface takes an address.",
)
def facts_are_known(cluster: ClusterConfig) -> Iterator[Problem]:
    for index, group in enumerate(cluster.instance_groups):
        machine = instance(group.instance_type)
        if machine is not None and machine.unknown:
            message = f"{group.instance_type}: the catalog has no {', '.join(machine.unknown)}"
            hint = "look at `aws ec2 describe-instance-types`"
            yield Problem(message, path=f"instance_groups.{index}.instance_type", hint=hint)


@check(
    "HPX218",
    "error",
    "two file systems at one place",
    "Each machine mounts them when it starts. The second mount fails, or hides the first, and jobs write where nobody "
    "looks for it.",
    "Give each file system a path of its own.",
)
def file_systems_have_places(cluster: ClusterConfig) -> Iterator[Problem]:
    for where, group in groups_of(cluster):
        present: dict[str, int] = {}
        for index, storage in enumerate(group.storage):
            if storage.kind == "ebs":
                continue
            default = "/fsx" if storage.kind == "fsx-lustre" else "HyperPod's own path"
            place = storage.path.rstrip("/") if storage.path else default
            first = present.setdefault(place, index)
            if first != index:
                field = "path" if storage.path else "kind"
                message = f"storage.{first} of the group is mounted at {place}, too"
                yield Problem(message, path=f"{where}.storage.{index}.{field}", hint="write a path of its own")


@check(
    "HPX219",
    "error",
    "spares and no machines that work",
    "Spares get no ranks until another machine fails. Where all machines are spares, no job of this cluster can start.",
    "Lower spares, or raise count.",
)
def some_machines_work(cluster: ClusterConfig) -> Iterator[Problem]:
    if cluster.working_nodes == 0 and not cluster.restricted_groups:
        for index, group in enumerate(cluster.instance_groups):
            if group.spares:
                message = f"all {group.count} machines are spares, and no group has others"
                yield Problem(message, path=f"instance_groups.{index}.spares", hint=f"write at most {group.count - 1}")
                return


@check(
    "HPX223",
    "warning",
    "a wait for idle nodes that never happens",
    "idle_s is read with the strategies WhenIdle and WhenAllIdle only; DrainFirst does not wait for idle nodes.",
    "Remove idle_s, or take another strategy.",
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
    "accelerators that run no jobs",
    "Slurm places no job on the group of the controller or of logins: its accelerators are paid for and idle.",
    "Give that group a type without accelerators, such as ml.m5.4xlarge.",
)
def accelerators_compute(cluster: ClusterConfig) -> Iterator[Problem]:
    for index, group in enumerate(cluster.instance_groups):
        machine = instance(group.instance_type)
        if group.slurm and group.slurm.node_type != "Compute" and machine is not None and machine.accelerators:
            message = f"{group.instance_type} has {machine.accelerators} accelerators, and the group is no Compute"
            hint = "take a type without accelerators"
            yield Problem(message, path=f"instance_groups.{index}.instance_type", hint=hint)


@check(
    "HPX221",
    "warning",
    "other types that are no substitute",
    "A job has one number of workers for all its nodes. Machines with another number of accelerators, which HyperPod "
    "may start in place of the first type, take no part in it, or stand idle in part.",
    "Name other types with as many accelerators of the same kind, or make a group for each.",
)
def other_types_are_as_large(cluster: ClusterConfig) -> Iterator[Problem]:
    for index, group in enumerate(cluster.instance_groups):
        first = instance(group.instance_type)
        for at, name in enumerate(group.other_types):
            other = instance(name)
            if first is None or other is None or first.accelerators == other.accelerators:
                continue
            message = f"{name} has {other.accelerators} accelerators, and {group.instance_type} {first.accelerators}"
            yield Problem(message, path=f"instance_groups.{index}.other_types.{at}", hint="make a group of its own")
