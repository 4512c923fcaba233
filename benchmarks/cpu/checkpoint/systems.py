"""Every system that is measured: what it is, where it runs, what it has. Plain data: nothing here imports a system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Has = Literal["overlapped", "survives", "restores", "replicates", "peer_restore", "restores_together", "drains"]


@dataclass(frozen=True)
class System:
    name: str
    label: str
    adapter: str
    """`module:class` in checkpoint.adapters."""
    has: frozenset[Has]
    about: str
    peer: str | None = None
    """Name of its environment in pins.txt; None: it runs in ours."""
    shims: str = ""
    """What was changed so that it runs here."""


def _has(*names: Has) -> frozenset[Has]:
    return frozenset(names)


OURS, MEMCPY, TORCH_SAVE = "ours", "memcpy", "torch.save"

SYSTEMS = {
    system.name: system
    for system in (
        System(
            OURS,
            "hyperpod_ext",
            "ours:Ours",
            _has("overlapped", "survives", "restores", "replicates", "peer_restore", "drains"),
            "hyperpod_ext's Checkpointer, with a memory server on the node",
        ),
        System(
            MEMCPY,
            "memcpy",
            "memcpy:Memcpy",
            _has("overlapped"),
            "copies each tensor with `copy_`; a save during a step copies in a thread",
        ),
        System(
            TORCH_SAVE, "torch.save", "torch_save:TorchSave", _has("survives", "restores"), "writes one file to memory"
        ),
        System("dcp.save", "dcp.save", "dcp:Save", _has("survives", "restores"), "writes files to memory"),
        System(
            "dcp.thread",
            "dcp.async_save, thread",
            "dcp:AsyncSave",
            _has("overlapped", "survives", "restores"),
            "uses one stager for all saves and writes files to memory; a save during a step stages in the background",
        ),
        System(
            "dcp.process",
            "dcp.async_save, process",
            "dcp:Process",
            _has("overlapped", "survives", "restores"),
            "uses one shared stager for all saves and writes files to memory; a save during a step stages in the "
            "background",
        ),
        System(
            "dlrover",
            "DLRover flash checkpoint",
            "dlrover:Flash",
            _has("survives", "restores"),
            "uses DdpCheckpointer with shared memory; gets each rank's parts of DTensors",
            peer="dlrover",
            shims="the benchmark starts DLRover's saver, because `dlrover-run` does not start with this "
            "torch; replicas were not measured, because they need the environment of DLRover's agent",
        ),
        System(
            "nvrx",
            "NVRx local",
            "nvrx:Local",
            _has("survives", "restores", "replicates", "peer_restore", "restores_together"),
            "uses LocalCheckpointManager and writes files to memory; gets each rank's parts of DTensors",
            peer="nvrx",
            shims="a state dict class for CPU tensors was added; torch.cuda.synchronize, current_device, "
            'Tensor.cuda and empty_like(device="cuda") were replaced by functions that use the CPU',
        ),
        System(
            "nvrx.async",
            "NVRx local, async (fork)",
            "nvrx:LocalAsync",
            _has("survives", "restores", "replicates", "peer_restore", "restores_together"),
            "same as NVRx local, but a process that is forked at each save writes the files",
            peer="nvrx",
            shims="same as in the previous row",
        ),
        System(
            "aws",
            "AWS tiered client",
            "aws:Tiered",
            _has("survives", "restores"),
            "uses dcp.async_save with SageMakerTieredStorageWriter, as documented, with only the memory tier",
            peer="aws",
            shims="the client's address and log folder are set from outside; a server of the benchmark "
            "with the same HTTP API replaces AWS's closed service",
        ),
        System(
            "aws.reused",
            "AWS tiered client, one stager",
            "aws:TieredReused",
            _has("survives", "restores"),
            "same as AWS tiered client, but with one stager for all saves",
            peer="aws",
            shims="same as in the previous row",
        ),
    )
}

KINDS = {"plain": 1, "sharded": 2}
"""Kinds of state, and on how many ranks each is measured."""
