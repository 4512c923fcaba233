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
    """Name of the type, `ml.p5.48xlarge`."""
    vcpus: int
    memory_gib: int
    arch: str
    """Architecture of the CPU, x86_64 or arm64."""
    accelerator: str | None
    """Accelerator, `H100`. None if the machine has no accelerator."""
    accelerators: int
    """Number of accelerators of one machine."""
    accelerator_memory_mib: int
    """Memory of each accelerator."""
    accelerator_resource: str | None
    """Kubernetes' resource name, `nvidia.com/gpu`."""
    neuron_cores: int
    efa: int | None
    """EFA interfaces of one machine; None if unknown."""
    network: str | None
    """EC2's description of the network, `3200 Gigabit`; None if unknown."""
    nvme_gb: int | None
    """Total size of the local disks in GB; None if unknown."""

    @property
    def unknown(self) -> list[str]:
        """Names of facts that are unknown."""
        facts = {"EFA interfaces": self.efa, "network": self.network, "local disks": self.nvme_gb}
        return [name for name, value in facts.items() if value is None]


@functools.cache
def instances() -> Mapping[str, Instance]:
    """Return all types by name."""
    found = facts("instance_types.json")["types"]
    return {name: Instance(name=name, **fields) for name, fields in sorted(found.items())}


def instance(name: str) -> Instance | None:
    """Return the type of this name; None if the catalog lacks it."""
    return instances().get(name)


def usable_cpus(machine: Instance) -> float:
    """Return the CPUs that pods can use, without those of the kubelet and daemons.

    Kubernetes' usual reservation (6 % of the first core, 1 % of the second, 0.5 % of the next two, 0.25 % of
    the others) and one core for daemons, down to a tenth of a core.
    """
    cores = machine.vcpus
    reserved = 0.06 + 0.01 * min(max(cores - 1, 0), 1) + 0.005 * min(max(cores - 2, 0), 2) + 0.0025 * max(cores - 4, 0)
    return max(int((cores - reserved - 1) * 10) / 10, 0.1)


def usable_memory_mib(machine: Instance) -> int:
    """Return the memory that pods can use, in MiB, by the usual reservation of Kubernetes.

    A machine has less than its nominal memory (Karpenter assumes 7.5 % less). Reserved are 25 % of the first 4 GiB,
    20 % of the next 4, 10 % of the next 8, 6 % of the next 112, 2 % of the rest, 100 MiB for eviction and 1 GiB for
    daemons.
    """
    there = machine.memory_gib * 0.925
    left, reserved = there, 0.0
    for size, share in ((4, 0.25), (4, 0.2), (8, 0.1), (112, 0.06), (left, 0.02)):
        part = min(left, size)
        reserved += part * share
        left -= part
    return max(int((there - reserved - 1) * 1024) - 100, 256)
