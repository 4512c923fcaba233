"""The objects that make up training state, and whether what they hold now is a whole step."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.checkpoint.checkpointer import Snapshot
from hyperpod_ext.runtime.checkpoint.manifest import crc64nvme
from hyperpod_ext.runtime.checkpoint.tree import Skeleton, put_together, take_apart


@runtime_checkable
class Stateful(Protocol):
    """Anything with PyTorch's two methods: modules, optimizers, schedulers, scalers, samplers."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Taken:
    """State of all objects at one moment, by reference."""

    skeleton: Skeleton
    tensors: list[torch.Tensor]
    own: list[torch.Tensor]
    """Those of `tensors` that data parallelism does not keep equal: buffers, and whatever is neither a
    module nor an optimizer."""

    def versions(self) -> list[int]:
        """Autograd's version counters; in-place changes raise them, but for those of fused optimizers and `.data`."""
        return [tensor._version for tensor in self.tensors]

    def own_digest(self) -> str:
        """Digest of what may differ from rank to rank. Equal on all of them: one rank's state serves any other."""
        text = json.dumps(self.skeleton).encode()
        return crc64nvme(text + b"".join(bytes(raw_bytes(tensor)) for tensor in self.own))


@dataclass(frozen=True, slots=True)
class Whole:
    """A step that live state holds wholly."""

    step: int
    save_id: str
    own_digest: str


class TrainingState:
    """Named objects of one rank, taken apart on demand."""

    def __init__(self, objects: Mapping[str, Stateful], before: TrainingState | None = None) -> None:
        for name, value in objects.items():
            if not isinstance(value, Stateful):
                raise JobFailedError(
                    f"restore({name}=...): {type(value).__name__} has no state_dict() and load_state_dict()",
                    hint="Pass modules, optimizers, schedulers, or objects with these two methods.",
                )
        self._objects = dict(objects)
        self._mark: tuple[Taken, list[int], Whole] | None = before._mark if before is not None else None
        if before is not None:
            before.close()
        # fused optimizers, and those that write through .data, change values that no counter tells of
        self._hooks = [
            value.register_step_pre_hook(lambda *_: self._spoil())
            for value in self._objects.values()
            if isinstance(value, torch.optim.Optimizer)
        ]

    def close(self) -> None:
        """Let go of the objects."""
        for hook in self._hooks:
            hook.remove()

    def _spoil(self) -> None:
        self._mark = None

    def clear_gradients(self) -> None:
        """Forget gradients of a step that a fault interrupted: its repeat would add to them."""
        for value in self._objects.values():
            if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
                value.zero_grad(set_to_none=True)

    def take(self) -> Taken:
        """Skeleton and live tensors."""
        tree = {name: value.state_dict() for name, value in self._objects.items()}
        skeleton, tensors = take_apart(tree)
        return Taken(skeleton, tensors, [t for name, value in self._objects.items() for t in _own(value, tree[name])])

    def load(self, snapshot: Snapshot) -> None:
        """Load a state taken on another rank or at another time; its tensors must not be shared with anyone."""
        tree = put_together(snapshot.skeleton, snapshot.tensors)
        if set(tree) != set(self._objects):
            raise JobFailedError(
                f"the snapshot holds {sorted(tree)}, this rank registered {sorted(self._objects)}",
                hint="Every rank must call restore() with the same names.",
            )
        self._mark = None
        for name, value in self._objects.items():
            try:
                value.load_state_dict(tree[name])
            except (RuntimeError, ValueError, KeyError) as error:
                raise JobFailedError(
                    f"{name} of this rank does not take the job's state: {error}",
                    hint="Build models and optimizers alike on every rank.",
                ) from error

    def commit(self, taken: Taken, whole: Whole) -> None:
        """What the objects hold now is all of `whole.step`."""
        self._mark = (taken, taken.versions(), whole)

    def whole(self) -> Whole | None:
        """What was committed last, or None when anything may have changed since."""
        if self._mark is None:
            return None
        committed, versions, whole = self._mark
        now = self.take()
        same = (
            now.skeleton == committed.skeleton
            and committed.versions() == versions
            and [(t.data_ptr(), t.shape) for t in now.tensors] == [(t.data_ptr(), t.shape) for t in committed.tensors]
        )
        return whole if same else None

    def digest(self) -> str:
        """SHA-256 over every value: two ranks, or two runs, with equal digests are bit for bit equal."""
        taken = self.take()
        digest = hashlib.sha256(json.dumps(taken.skeleton).encode())
        for tensor in taken.tensors:
            digest.update(raw_bytes(tensor))
        return digest.hexdigest()


def raw_bytes(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    """The bytes of a tensor, without a copy where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous()
    nbytes = flat.numel() * flat.element_size()
    view = (ctypes.c_char * nbytes).from_address(flat.data_ptr()) if nbytes else (ctypes.c_char * 0)()
    view._keeps_alive = flat  # type: ignore[attr-defined]  # a copy would be freed under the view
    return view


def _own(value: Stateful, state: Any) -> list[torch.Tensor]:
    """Tensors of one object's state that each rank may have its own of."""
    if isinstance(value, torch.optim.Optimizer):
        return []
    if isinstance(value, torch.nn.Module):
        shared = {name for name, _ in value.named_parameters(remove_duplicate=False)}
        return [entry for name, entry in state.items() if name not in shared and isinstance(entry, torch.Tensor)]
    return take_apart(state)[1]
