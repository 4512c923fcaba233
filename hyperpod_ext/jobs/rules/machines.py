"""Rules that compare the requests of pods with the resources of machines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from hyperpod_ext.catalog import labels
from hyperpod_ext.catalog.instances import Instance, instance, instances, usable_cpus, usable_memory_mib
from hyperpod_ext.config.files.checks import Finding
from hyperpod_ext.config.files.document import Path
from hyperpod_ext.config.files.nearest import nearest
from hyperpod_ext.config.job.volumes import ScratchVolume
from hyperpod_ext.counts import count
from hyperpod_ext.jobs.kubernetes.sizes import NodeShare, instance_type_of, spans_nodes
from hyperpod_ext.jobs.rules import KUBERNETES, Context, rule

_OF_A_NODE = ("resources", "node_groups", "nodes", "workers_per_node", "elastic.max_nodes")
"""Fields of the spec that `_machines` reads."""


def _machines(context: Context) -> Iterator[tuple[Path, Instance, NodeShare]]:
    """Yield each instance type of the job that the catalog knows.

    Each result is the field that names the instance type, the type itself, and a pod's resource requests on this type.
    """
    for path, share in context.node_shares:
        if share.machine:
            yield path, share.machine, share


@rule(
    "HPX111",
    "error",
    "more accelerators than the machine has",
    "The pod would wait for ever, because no node of this type can hold it.",
    "Request fewer accelerators, or choose a larger instance type. `hp-ext instances` lists types.",
    reads=_OF_A_NODE,
)
def accelerators_fit(context: Context) -> Iterator[Finding]:
    for _path, machine, share in _machines(context):
        own = share.accelerator_resource == machine.accelerator_resource
        if own and share.accelerators > machine.accelerators:
            path = ("resources", "accelerators") if context.job.resources.accelerators else ("workers_per_node",)
            message = f"{machine.name} has {machine.accelerators} {machine.accelerator}, but the job needs "
            message += f"{share.accelerators} on each node"
            yield Finding(path, message, f"write at most {machine.accelerators}")
            return


@rule(
    "HPX112",
    "warning",
    "workers and accelerators differ in number",
    "With fewer workers than accelerators, some paid accelerators are idle. With more workers, several share one "
    "accelerator.",
    "Set workers_per_node to the number of accelerators.",
)
def workers_use_the_accelerators(context: Context) -> Iterator[Finding]:
    workers = context.job.workers_per_node
    if workers == 1 and context.job.command is not None:
        return  # a command with one worker may start further workers itself
    for _path, machine, share in _machines(context):
        if machine.neuron_cores or not share.accelerators or share.accelerator_resource != machine.accelerator_resource:
            continue
        if share.accelerators != workers:
            message = f"is {workers}, but the job requests {count(share.accelerators, 'accelerator')} on each node, "
            message += "and each worker uses one"
            hint = f"write {share.accelerators}, or set resources.accelerators to {workers}"
            yield Finding(("workers_per_node",), message, hint)
            return


@rule(
    "HPX113",
    "error",
    "more EFA interfaces than the machine has",
    "The pod would wait for ever, because no node of this type can hold it.",
    "Request fewer interfaces. `hp-ext instances` shows the number of each type.",
    reads=_OF_A_NODE,
)
def efa_fits(context: Context) -> Iterator[Finding]:
    asked = context.job.resources.efa
    for _path, machine, _share in _machines(context):
        if asked is not None and machine.efa is not None and asked > machine.efa:
            message = f"{machine.name} has {machine.efa} EFA interfaces, not {asked}"
            yield Finding(("resources", "efa"), message, f"write at most {machine.efa}")
            return


@rule(
    "HPX139",
    "error",
    "the number of EFA interfaces is unknown",
    "If the catalog lacks the number of EFA interfaces of a type, a job of several nodes is rendered without EFA. "
    "The job's ranks would communicate over TCP, which is many times slower.",
    "Write resources.efa: the number that `aws ec2 describe-instance-types` shows for the type, or 0 for TCP.",
    reads=_OF_A_NODE,
)
def efa_is_known(context: Context) -> Iterator[Finding]:
    job = context.job
    if job.resources.efa is not None or not spans_nodes(job):
        return
    for path, machine, _share in _machines(context):
        if machine.efa is None:
            message = f"the number of EFA interfaces of {machine.name} is not in the catalog of hp-ext"
            hint = "set resources.efa to the number that `aws ec2 describe-instance-types` shows, or to 0 for TCP"
            yield Finding(path, message, hint)
            return


@rule(
    "HPX114",
    "warning",
    "EFA interfaces that the job does not use, or leaves unused",
    "A job of one node does not use EFA. A job with all accelerators of a node but not all EFA interfaces leaves "
    "bandwidth unused that no other job can use.",
    "Remove resources.efa. The default follows from the instance type and the number of nodes.",
)
def efa_is_used(context: Context) -> Iterator[Finding]:
    job, asked = context.job, context.job.resources.efa
    if asked is None:
        return
    if asked and not spans_nodes(job):
        yield Finding(("resources", "efa"), "a job of one node does not use EFA", "remove resources.efa")
        return
    for _path, machine, share in _machines(context):
        full_node = 0 < machine.accelerators <= share.accelerators and spans_nodes(job)
        if full_node and machine.efa is not None and asked < machine.efa:
            message = (
                f"the job uses all accelerators of {machine.name}, but only {asked} of its {machine.efa} EFA interfaces"
            )
            yield Finding(("resources", "efa"), message, f"write {machine.efa}, or remove resources.efa")
            return


@rule(
    "HPX115",
    "error",
    "more CPU or memory than pods can have",
    "Kubernetes and the daemons of a node reserve a part of its CPU and memory. A pod that requests the whole "
    "machine is never scheduled.",
    "Request less, or remove cpus and memory_mib. The defaults follow from the instance type.",
    reads=_OF_A_NODE,
)
def cpu_and_memory_fit(context: Context) -> Iterator[Finding]:
    asked = context.job.resources
    for _path, machine, share in _machines(context):
        cpus, memory = usable_cpus(machine), usable_memory_mib(machine) - (share.hugepages_mib or 0)
        if asked.cpus is not None and asked.cpus > cpus:
            message = f"pods can use only {cpus:g} of the {machine.vcpus} CPUs of {machine.name}"
            yield Finding(("resources", "cpus"), message, f"write at most {cpus:g}, or remove cpus")
        if asked.memory_mib is not None and asked.memory_mib > memory:
            message = f"pods can use only {memory} MiB of the {machine.memory_gib} GiB of {machine.name}"
            yield Finding(("resources", "memory_mib"), message, f"write at most {memory}, or remove memory_mib")
        return


@rule(
    "HPX116",
    "error",
    "huge pages without CPU or memory",
    "Kubernetes refuses a pod that requests huge pages but neither CPU nor memory.",
    "Write resources.instance_type, which sets both by default, or resources.memory_mib.",
    targets=KUBERNETES,
)
def hugepages_need_memory(context: Context) -> Iterator[Finding]:
    _path, share = context.node_shares[-1]
    if share.hugepages_mib and share.cpus is None and share.memory_mib is None:
        hint = "add resources.memory_mib, or resources.instance_type"
        yield Finding(
            ("resources", "hugepages_mib"), "a request of huge pages also needs a request of CPU or memory", hint
        )


@rule(
    "HPX117",
    "warning",
    "an unknown instance type",
    "The catalog does not have this type, so checks and defaults that depend on it are skipped.",
    "Correct the name, or ignore this if the type is newer than this version.",
)
def instance_type_is_known(context: Context) -> Iterator[Finding]:
    job = context.job
    named: list[tuple[Path, str | None]] = [(("resources", "instance_type"), job.resources.instance_type)]
    named += [(("node_groups", index, "instance_type"), g.instance_type) for index, g in enumerate(job.node_groups)]
    known = instances()
    for path, name in named:
        if name is not None and name not in known:
            near = _of_same_family(name, known) or nearest(name, known)
            hint = (f"did you mean `{near}`? " if near else "") + "`hp-ext instances --all` lists all"
            yield Finding(path, f"`{name}` is not in the catalog", hint)


_FAMILY_AND_SIZE = re.compile(r"(.+)\.([0-9]{1,4})xlarge")


def _of_same_family(name: str, known: Iterable[str]) -> str | None:
    """Return the known type of the same family with the most similar size, such as `ml.p5.48xlarge` for
    `ml.p5.49xlarge`; None if the family is unknown."""
    asked = _FAMILY_AND_SIZE.fullmatch(name)
    if asked is None:
        return None
    family, size = asked[1], int(asked[2])
    found = [one for one in map(_FAMILY_AND_SIZE.fullmatch, known) if one and one[1] == family]
    closest = min(found, key=lambda one: abs(int(one[2]) - size), default=None)
    return closest[0] if closest else None


@rule(
    "HPX130",
    "error",
    "a node selector for another instance type",
    "Pods request the resources of resources.instance_type, but would run on machines of the other type, or not at "
    "all.",
    "Write the type in resources.instance_type, or in the group's instance_type, and remove the label.",
    targets=KUBERNETES,
)
def selected_nodes_are_of_the_type(context: Context) -> Iterator[Finding]:
    job = context.job
    places: list[tuple[Path, Mapping[str, str], str | None]] = [
        (("scheduling", "node_selector"), job.scheduling.node_selector, job.resources.instance_type)
    ]
    for index, group in enumerate(job.node_groups):
        places.append((("node_groups", index, "node_selector"), group.node_selector, instance_type_of(job, group)))
    for path, selected, wanted in places:
        for label in (labels.INSTANCE_TYPE, f"beta.{labels.INSTANCE_TYPE.removeprefix('node.')}"):
            other = selected.get(label)  # outside HyperPod, the label's value has no prefix `ml.`
            if wanted and other and other.removeprefix("ml.") != wanted.removeprefix("ml."):
                message = f"selects {other}, but instance_type is {wanted}"
                yield Finding((*path, label), message, f"remove the selector, or write {other} as instance_type")


@rule(
    "HPX118",
    "error",
    "more memory volumes and tiers than the pod has memory",
    "/dev/shm, scratch volumes in memory and the memory tier all use the pod's memory. In total they exceed the "
    "pod's request, so Kubernetes may kill the pod.",
    "Make them smaller, or use a machine with more memory.",
    targets=KUBERNETES,
)
def memory_is_enough(context: Context) -> Iterator[Finding]:
    job = context.job
    memory = context.node_shares[-1][1].memory_mib
    tier = job.checkpoint.memory() if job.mode == "ours" else None
    parts = {
        ("shared_memory_mib",): job.shared_memory_mib or 0,
        ("checkpoint", "tiers"): (tier.budget_mib or 0) if tier else 0,
        ("volumes",): sum(v.size_mib or 0 for v in job.volumes if isinstance(v, ScratchVolume) and v.in_memory),
    }
    total = sum(parts.values())
    if memory is not None and total > memory:
        path = max(parts, key=lambda one: parts[one])
        names = {"checkpoint": "the memory tier's budget_mib", "volumes": "size_mib of volumes in memory"}
        listed = " plus ".join(f"the {size} MiB of {names.get(one, one)}" for (one, *_), size in parts.items() if size)
        message = f"the pod has {memory} MiB of memory, which is less than {listed}"
        yield Finding(path, message, "write a smaller number, or give the pod more memory")


@rule(
    "HPX119",
    "error",
    "machines that the cluster does not have",
    "The cluster's instance groups have no machines of this type, or fewer than the job has nodes.",
    "Use an instance type of the cluster, or add a group of this type to the cluster.",
)
def cluster_has_the_machines(context: Context) -> Iterator[Finding]:
    wanted, cluster = context.job.resources.instance_type, context.cluster
    if cluster is None or wanted is None or context.job.node_groups:
        return
    there = sum(group.count - group.spares for group in cluster.instance_groups if group.instance_type == wanted)
    path = ("resources", "instance_type")
    if not there:
        types = " or ".join(sorted({group.instance_type for group in cluster.instance_groups}))
        hint = f"use {types}, or add a group of this type to the cluster"
        yield Finding(path, f"cluster {cluster.name} has no machines of type {wanted}", hint)
    elif there < context.job.nodes:
        yield Finding(
            path,
            f"cluster {cluster.name} has only {count(there, 'machine')} of type {wanted}, not counting spares",
            f"write nodes: {there}, or add machines to the cluster",
        )


@rule(
    "HPX125",
    "warning",
    "GPU slices that cannot communicate",
    "A process sees one MIG slice, and slices cannot communicate: peer-to-peer and CUDA IPC do not work, and NCCL "
    "refuses two slices of one GPU. Training on several slices needs gloo.",
    "Use one worker with one slice, or use whole GPUs: remove accelerator_resource.",
)
def slices_are_used_alone(context: Context) -> Iterator[Finding]:
    job, asked = context.job, context.job.resources
    if not (asked.accelerator_resource or "").startswith("nvidia.com/mig-"):
        return
    if (asked.accelerators or 0) > job.workers_per_node:
        workers = count(job.workers_per_node, "worker")
        message = f"{asked.accelerators} slices for {workers}, but each worker uses one slice"
        yield Finding(("resources", "accelerators"), message, f"write {job.workers_per_node}")
    if job.world_size > 1:
        message = f"NCCL cannot connect {job.world_size} ranks on MIG slices of GPUs"
        yield Finding(("resources", "accelerator_resource"), message, "remove it, to use whole GPUs")


@rule(
    "HPX105",
    "error",
    "checkpointless training without NVIDIA GPUs",
    "AWS's checkpointless container moves the state between GPUs with NCCL.",
    "Choose an instance type with NVIDIA GPUs. AWS's recipes use ml.p5.48xlarge.",
    reads=("mode", "resources.instance_type"),
)
def checkpointless_needs_gpus(context: Context) -> Iterator[Finding]:
    job = context.job
    if job.mode != "aws-checkpointless":
        return
    machine = instance(job.resources.instance_type or "")
    if machine and machine.accelerator_resource != "nvidia.com/gpu":
        path = ("resources", "instance_type")
        yield Finding(path, f"{machine.name} has no NVIDIA GPUs", "use a type with NVIDIA GPUs, such as ml.p5.48xlarge")


@rule(
    "HPX122",
    "error",
    "memory that AWS's checkpointing daemon reserves",
    "The daemon of managed tiered checkpointing reserves a share of each node's memory, even if no job uses it. A "
    "pod that requests more memory than the daemon leaves is never scheduled.",
    "Lower memory_mib, or memory_percent of the cluster's tiered_storage.",
    targets=KUBERNETES,
)
def memory_is_left_for_the_daemon(context: Context) -> Iterator[Finding]:
    storage = context.cluster.tiered_storage if context.cluster else None
    _path, share = context.node_shares[-1]
    machine, asked = share.machine, share.memory_mib  # `asked` defaults to the node's memory for pods
    if storage is None or not storage.enabled or not storage.memory_percent or machine is None:
        return
    left = int(machine.memory_gib * 1024 * (1 - storage.memory_percent / 100))
    if asked is not None and asked > left:
        message = f"a pod requests {asked} MiB, but AWS's daemon for tiered storage leaves only {left} MiB of "
        message += f"{machine.name} for pods"
        yield Finding(("resources", "memory_mib"), message, f"write at most {left}")
