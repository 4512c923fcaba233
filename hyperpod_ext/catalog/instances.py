"""Instance types of HyperPod and SageMaker training, and the CPUs and memory that pods can use."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from hyperpod_ext.catalog import facts


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance type."""

    name: str
    """Name of the instance type, such as `ml.p5.48xlarge`."""
    vcpus: int
    memory_gib: int
    arch: str
    """Architecture of the CPU, `x86_64` or `arm64`."""
    accelerator: str | None
    """Name of the accelerator, such as `H100`. None if the machine has no accelerator."""
    accelerators: int
    """Number of accelerators in one machine."""
    accelerator_memory_mib: int
    """Memory of each accelerator in MiB."""
    accelerator_resource: str | None
    """Kubernetes resource name of the accelerators, such as `nvidia.com/gpu`. None if the machine has no
    accelerator."""
    neuron_cores: int
    efa: int | None
    """Number of EFA interfaces of one machine. None: unknown."""
    network: str | None
    """EC2's description of the network, such as `3200 Gigabit`. None: unknown."""
    nvme_gb: int | None
    """Total size of the local disks of one machine in GB. None: unknown."""

    @property
    def unknown(self) -> list[str]:
        """Descriptions of the facts that the catalog lacks for this instance type."""
        facts = {"EFA interfaces": self.efa, "network": self.network, "local disks": self.nvme_gb}
        return [name for name, value in facts.items() if value is None]


@functools.cache
def instances() -> Mapping[str, Instance]:
    """Return all instance types of the catalog, by name."""
    found = facts("instance_types.json")["types"]
    return {name: Instance(name=name, **fields) for name, fields in sorted(found.items())}


def instance(name: str) -> Instance | None:
    """Return the instance type with the name `name`; None if the catalog lacks it."""
    return instances().get(name)


def usable_cpus(machine: Instance) -> float:
    """Return the number of CPUs that pods can use on one machine.

    Kubernetes usually reserves 6 % of the first core, 1 % of the second, 0.5 % of the next two and 0.25 % of all other
    cores. One more core is reserved for daemons. The number of CPUs is rounded down to a tenth of a core.
    """
    cores = machine.vcpus
    reserved = 0.06 + 0.01 * min(max(cores - 1, 0), 1) + 0.005 * min(max(cores - 2, 0), 2) + 0.0025 * max(cores - 4, 0)
    return max(int((cores - reserved - 1) * 10) / 10, 0.1)


def usable_memory_mib(machine: Instance) -> int:
    """Return the memory in MiB that pods can use on one machine.

    A machine has less memory than AWS states; Karpenter assumes 7.5 % less. Kubernetes usually reserves 25 % of the
    first 4 GiB, 20 % of the next 4 GiB, 10 % of the next 8 GiB, 6 % of the next 112 GiB, 2 % of the remaining memory,
    and 100 MiB for eviction. One more GiB is reserved for daemons.
    """
    there = machine.memory_gib * 0.925
    left, reserved = there, 0.0
    for size, share in ((4, 0.25), (4, 0.2), (8, 0.1), (112, 0.06), (left, 0.02)):
        part = min(left, size)
        reserved += part * share
        left -= part
    return max(int((there - reserved - 1) * 1024) - 100, 256)
