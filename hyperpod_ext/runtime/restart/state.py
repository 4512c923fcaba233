"""The objects that make up training state, and whether what they hold now is a whole step."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.checkpoint.tree import Skeleton, put_together, take_apart


@runtime_checkable
class Stateful(Protocol):
    """Anything with PyTorch's two methods: modules, optimizers, schedulers, scalers, samplers."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class TrainingState:
    """Named objects of one rank, taken apart on demand."""

    def __init__(self, objects: Mapping[str, Stateful]) -> None:
        for name, value in objects.items():
            if not isinstance(value, Stateful):
                raise JobFailedError(
                    f"restore({name}=...): {type(value).__name__} has no state_dict() and load_state_dict()",
                    hint="Pass modules, optimizers, schedulers, or objects with these two methods.",
                )
        self._objects = dict(objects)
        self._mark: tuple[Skeleton, list[torch.Tensor], list[int]] | None = None
        self._step: int | None = None

    def take(self) -> tuple[Skeleton, list[torch.Tensor]]:
        """Skeleton and live tensors, by reference."""
        return take_apart({name: value.state_dict() for name, value in self._objects.items()})

    def load(self, skeleton: Skeleton, tensors: list[torch.Tensor]) -> None:
        """Load a state taken on another rank or at another time. `tensors` must not be shared with anyone."""
        tree = put_together(skeleton, tensors)
        if set(tree) != set(self._objects):
            raise JobFailedError(
                f"the snapshot holds {sorted(tree)}, this rank registered {sorted(self._objects)}",
                hint="Every rank must call restore() with the same names.",
            )
        for name, value in self._objects.items():
            try:
                value.load_state_dict(tree[name])
            except (RuntimeError, ValueError, KeyError) as error:
                raise JobFailedError(
                    f"{name} of this rank does not take the job's state: {error}",
                    hint="Build models and optimizers alike on every rank.",
                ) from error

    def commit(self, step: int, skeleton: Skeleton, tensors: list[torch.Tensor]) -> None:
        """What the objects hold now is the whole state of `step`."""
        self._mark = (skeleton, tensors, [tensor._version for tensor in tensors])
        self._step = step

    def whole_step(self) -> int | None:
        """Step that the live objects hold, or None when something changed since its commit.

        Autograd's version counters tell: every in-place change raises them, an interrupted optimizer's too.
        """
        if self._mark is None:
            return None
        skeleton, tensors, versions = self._mark
        now_skeleton, now = self.take()
        same = (
            now_skeleton == skeleton
            and [tensor._version for tensor in tensors] == versions
            and [(t.data_ptr(), t.shape) for t in now] == [(t.data_ptr(), t.shape) for t in tensors]
        )
        return self._step if same else None

    def digest(self) -> str:
        """SHA-256 over every value: two ranks, or two runs, with equal digests are bit for bit equal."""
        skeleton, tensors = self.take()
        digest = hashlib.sha256(repr(skeleton).encode())
        for tensor in tensors:
            digest.update(raw_bytes(tensor.detach().cpu().contiguous()))
        return digest.hexdigest()


def raw_bytes(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    """The bytes of a contiguous CPU tensor, without a copy. Valid while the tensor lives."""
    nbytes = tensor.numel() * tensor.element_size()
    return (ctypes.c_char * nbytes).from_address(tensor.data_ptr()) if nbytes else (ctypes.c_char * 0)()
