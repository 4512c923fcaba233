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
            "Checkpointer, with its memory server on the node",
        ),
        System(MEMCPY, "memcpy", "memcpy:Memcpy", _has("overlapped"), "copy_ of each tensor; overlapped: in a thread"),
        System(TORCH_SAVE, "torch.save", "torch_save:TorchSave", _has("survives", "restores"), "a file in memory"),
        System("dcp.save", "dcp.save", "dcp:Save", _has("survives", "restores"), "files in memory"),
        System(
            "dcp.thread",
            "dcp.async_save, thread",
            "dcp:AsyncSave",
            _has("overlapped", "survives", "restores"),
            "one stager for all saves; overlapped: staging in the background; files in memory",
        ),
        System(
            "dcp.process",
            "dcp.async_save, process",
            "dcp:Process",
            _has("overlapped", "survives", "restores"),
            "one shared stager for all saves; overlapped: staging in the background; files in memory",
        ),
        System(
            "dlrover",
            "DLRover flash checkpoint",
            "dlrover:Flash",
            _has("survives", "restores"),
            "DdpCheckpointer to shared memory; DTensors are given as each rank's parts",
            peer="dlrover",
            shims="the saver is started by the benchmark as its agent would, since `dlrover-run` does not start with "
            "this torch; replicas not run: its backup groups need its agent's environment",
        ),
        System(
            "nvrx",
            "NVRx local",
            "nvrx:Local",
            _has("survives", "restores", "replicates", "peer_restore", "restores_together"),
            "LocalCheckpointManager, files in memory; DTensors are given as each rank's parts",
            peer="nvrx",
            shims="a state dict class for CPU tensors; torch.cuda.synchronize, current_device, Tensor.cuda and "
            'empty_like(device="cuda") answered with the CPU',
        ),
        System(
            "nvrx.async",
            "NVRx local, async (fork)",
            "nvrx:LocalAsync",
            _has("survives", "restores", "replicates", "peer_restore", "restores_together"),
            "as above, written by a process that is forked at each save",
            peer="nvrx",
            shims="as above",
        ),
        System(
            "aws",
            "AWS tiered client",
            "aws:Tiered",
            _has("survives", "restores"),
            "dcp.async_save with SageMakerTieredStorageWriter, as documented; memory tier only",
            peer="aws",
            shims="address and log folder of the client set from outside; its closed service replaced by a server of "
            "the benchmark that speaks the same HTTP",
        ),
        System(
            "aws.reused",
            "AWS tiered client, one stager",
            "aws:TieredReused",
            _has("survives", "restores"),
            "as above, one stager for all saves",
            peer="aws",
            shims="as above",
        ),
    )
}

KINDS = {"plain": 1, "sharded": 2}
"""Kinds of state, and on how many ranks each is measured."""
