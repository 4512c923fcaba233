"""Resource requests of a job's pods, from the spec or the instance type, and the time to wait for a new pod. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from hyperpod_ext.catalog.instances import Instance, instance, usable_cpus, usable_memory_mib
from hyperpod_ext.catalog.labels import EFA, HUGEPAGES
from hyperpod_ext.config.files.document import Path
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.scheduling import NodeGroup

NEW_POD_S = 900.0
"""Default seconds to wait for a new pod after the loss of a pod, including the replacement of the pod's machine."""
_HUGEPAGES_MIB = 5120
"""MiB of huge pages that a pod requests for EFA, as in AWS's examples."""

_QUANTITY = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)")
_UNITS = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_UNITS |= {f"{unit}i": 2.0 ** (10 * power) for power, unit in enumerate("KMGTPE", start=1)}


@dataclass(frozen=True, slots=True)
class NodeShare:
    """Resources that a pod requests from its node; a value of None or 0 means that the resource is not requested."""

    accelerators: int
    accelerator_resource: str | None
    efa: int
    cpus: float | None
    memory_mib: int | None
    hugepages_mib: int | None
    ephemeral_storage_mib: int | None
    machine: Instance | None
    """Instance type of the node; None if the catalog does not have it."""

    def limits(self) -> dict[str, str]:
        """Return the pod's resource limits.

        Only extended resources and huge pages have a limit, which must be equal to the request.
        """
        found: dict[str, str] = {}
        if self.accelerators and self.accelerator_resource:
            found[self.accelerator_resource] = str(self.accelerators)
        if self.efa:
            found[EFA] = str(self.efa)
        if self.hugepages_mib:
            found[HUGEPAGES] = f"{self.hugepages_mib}Mi"
        return found

    def requests(self) -> dict[str, str]:
        """Return the pod's resource requests."""
        found: dict[str, str] = {}
        if self.cpus is not None:
            found["cpu"] = cpu_quantity(self.cpus)
        if self.memory_mib is not None:
            found["memory"] = f"{self.memory_mib}Mi"
        if self.ephemeral_storage_mib is not None:
            found["ephemeral-storage"] = f"{self.ephemeral_storage_mib}Mi"
        return found | self.limits()


def size_of(quantity: str, units: Collection[str] = _UNITS) -> float:
    """Return the value of a Kubernetes quantity, such as `500m` or `4Gi`: a number of bytes, CPUs or items.

    Args:
        units: units that the quantity may have.

    Raises:
        ValueError: the text is not a quantity, or its unit is not in `units`.
    """
    match = _QUANTITY.fullmatch(quantity)
    if match is None or match[2] not in units:
        raise ValueError(f"{quantity[:40]!r} is not a quantity")
    return float(match[1]) * _UNITS[match[2]]


def cpu_quantity(cpus: float) -> str:
    """Return a number of CPUs as a Kubernetes quantity, such as `4`, or `500m` for half a CPU.

    The result is at least `1m`, Kubernetes' minimum.
    """
    thousandths = max(round(cpus * 1000), 1)
    return str(thousandths // 1000) if thousandths % 1000 == 0 else f"{thousandths}m"


def instance_type_of(job: JobConfig, group: NodeGroup | None = None) -> str | None:
    """Return the instance type of the nodes in `group`, or of the job's nodes if `group` is None or has no type."""
    return (group.instance_type if group else None) or job.resources.instance_type


def spans_nodes(job: JobConfig) -> bool:
    """Return whether the job may run on several nodes."""
    return max(job.nodes, job.elastic.max_nodes if job.elastic else 0) > 1


def node_share(job: JobConfig, group: NodeGroup | None = None) -> NodeShare:
    """Return the resources that a pod of `job` requests.

    Args:
        group: group of nodes to which the pod belongs; None if the job has no groups.
    """
    asked = job.resources
    machine = instance(instance_type_of(job, group) or "")
    there = machine.accelerators if machine else 0
    resource = asked.accelerator_resource or (machine.accelerator_resource if machine else None)
    accelerators = asked.accelerators
    if accelerators is None:
        neuron = machine is not None and machine.neuron_cores > 0
        accelerators = there if neuron else job.workers_per_node if resource else 0
    if accelerators and resource is None:
        resource = "nvidia.com/gpu"
    efa = asked.efa
    if efa is None:
        full_node = machine is not None and 0 < there <= accelerators
        efa = (machine.efa or 0) if machine and full_node and spans_nodes(job) else 0
    hugepages = asked.hugepages_mib
    if hugepages is None and efa and machine:
        hugepages = _HUGEPAGES_MIB
    cpus, memory = asked.cpus, asked.memory_mib
    if machine:
        share = min(accelerators / there, 1.0) if there and accelerators else 1.0
        if cpus is None:
            cpus = max(int(usable_cpus(machine) * share * 10) / 10, 0.1)
        if memory is None:
            memory = max(int((usable_memory_mib(machine) - (hugepages or 0)) * share), 256)
    return NodeShare(
        accelerators=accelerators,
        accelerator_resource=resource if accelerators else None,
        efa=efa,
        cpus=cpus,
        memory_mib=memory,
        hugepages_mib=hugepages,
        ephemeral_storage_mib=asked.ephemeral_storage_mib,
        machine=machine,
    )


def node_shares(job: JobConfig) -> list[tuple[Path, NodeShare]]:
    """Return the resource requests of a pod for each instance type of the job, with the field that names the type.

    The type in `resources.instance_type` is last.
    """
    groups: list[tuple[Path, NodeShare]] = [
        (("node_groups", index, "instance_type"), node_share(job, group))
        for index, group in enumerate(job.node_groups)
        if group.instance_type
    ]
    return [*groups, (("resources", "instance_type"), node_share(job))]
