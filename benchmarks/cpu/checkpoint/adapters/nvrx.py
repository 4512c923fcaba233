"""NVRx's local checkpoints: LocalCheckpointManager into a folder in memory, at once or by a forked process.

It is written for CUDA: its state dict class asserts CUDA tensors, and its callers ask for the current device.
A class of the same kind for CPU tensors and a few CUDA calls put out of action let it run; its logic is untouched.
"""

from __future__ import annotations

import logging
import shutil
from typing import Any

import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

from checkpoint.adapters import Adapter, Host, Place
from checkpoint.state import State, leaves, local_state

logging.getLogger("nvidia_resiliency_ext").setLevel(logging.ERROR)
torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
_empty_like = torch.empty_like


def _empty_like_on_cpu(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
    if options.get("device") == "cuda":
        options["device"] = "cpu"
    return _empty_like(tensor, **options)


torch.empty_like = _empty_like_on_cpu


class CpuStateDict(BasicTensorAwareStateDict):
    """As its parent, but the tensors are and stay on the CPU. Known by name, since it is pickled."""

    def __init__(self, state_dict: State) -> None:
        self.state_dict, self._is_hollow = state_dict, False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        assert not self.is_hollow

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        assert not self.is_hollow


class Local(Adapter):
    """Saves at once."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        replicas = None
        if place.replicas:
            replicas = CliqueReplicationStrategy.from_replication_params(1, 1 + place.replicas)
        self._manager = LocalCheckpointManager(place.folder / "nvrx", "bench", replicas)

    @classmethod
    def lose_memory_of(cls, place: Place, host: Host, rank: int) -> None:
        shutil.rmtree(place.folder / "nvrx" / "bench" / str(rank))

    def save(self, state: State, step: int) -> None:
        self._manager.save(CpuStateDict(local_state(state)), step)

    @torch.no_grad()
    def restore(self, state: State) -> int:
        step = self._manager.find_latest()
        saved: Any = self._manager.load()[0]
        for mine, theirs in zip(leaves(local_state(state)), leaves(saved.state_dict), strict=True):
            mine.copy_(theirs)
        return int(step)


class LocalAsync(Local):
    """Forks a process, which writes the state as it was at the fork."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._queue = AsyncCallsQueue(persistent=False)

    def save(self, state: State, step: int) -> None:
        self.wait_safe()
        self._queue.schedule_async_request(self._manager.save(CpuStateDict(local_state(state)), step, is_async=True))

    def busy(self) -> bool:
        self._queue.maybe_finalize_async_calls(blocking=False)
        return bool(self._queue.get_num_unfinalized_calls())

    def wait_safe(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True)

    wait_replicated = flush = wait_safe

    def close(self) -> None:
        self._queue.close()
