"""The registered objects of one rank (`TrainingState`), their state, and the check whether this state is that of a
complete step."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.snapshot.image import (
    Layout,
    check_memory,
    chunk_of,
    has_memory,
    holders_of,
    is_dtensor,
    local_of,
)
from hyperpod_ext.runtime.snapshot.layout_plan import Item
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme, crc_text
from hyperpod_ext.runtime.snapshot.model_parallel import held_shard, is_distributed_optimizer
from hyperpod_ext.runtime.snapshot.sharing import Sharing
from hyperpod_ext.runtime.snapshot.snapshot import Like, Snapshot, fill
from hyperpod_ext.runtime.snapshot.tree import Form, Parts, Path, fqn, leaf_paths, put_together, take_apart
from hyperpod_ext.runtime.state import gradients
from hyperpod_ext.runtime.state.built import Built, Changes, Keys, keys_of, tensors_of
from hyperpod_ext.runtime.state.data_access import DataAccess
from hyperpod_ext.runtime.state.large_values import LargeValues, unpack
from hyperpod_ext.runtime.state.optimizer_state import bytes_to_come, load_state
from hyperpod_ext.runtime.state.same_data import DataPositions, data_positions_of

_SHARDING_OPTIMIZERS = frozenset(
    {
        *("ZeroRedundancyOptimizer", "OSS", "DistributedFusedAdam", "DistributedFusedLAMB"),
        *("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"),
    }
)
"""Optimizer classes of torch, fairscale, apex and DeepSpeed that divide their state among ranks, and are refused."""


_LOOSE = "(gradients)"
"""Key of the gradients of parameters outside all optimizers, in the saved state, whose other keys are the objects'
names."""


@runtime_checkable
class Stateful(Protocol):
    """Any object with `state_dict()` and `load_state_dict()`, such as a module, optimizer, scheduler or sampler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class CapturedState:
    """State of all registered objects at one moment, with references to the live tensors instead of copies."""

    parts: Parts
    own: list[torch.Tensor]
    """Tensors that data parallelism does not keep equal: buffers of modules, and tensors of objects other than modules
    and optimizers."""
    keys: Keys
    """Keys of each module's `state_dict()`."""
    parameters: list[torch.Tensor]
    """Parameters of all objects, in the order of `gradients.parameters`."""

    @property
    def is_sharded(self) -> bool:
        """Whether the state only fits one world size: it has DTensors (even replicated ones) or Megatron's shards."""
        return held_shard() is not None or any(is_dtensor(tensor) for tensor in self.parts.tensors)

    def versions(self) -> list[tuple[int, int, torch.Size]]:
        """Return the version counter of autograd, the address and the shape of each tensor.

        An in-place change increases the counter, unless the change is made by a fused optimizer or through `.data`.
        """
        local = [getattr(tensor, "_local_tensor", tensor) for tensor in self.parts.tensors]
        return [(0 if one.is_inference() else one._version, one.data_ptr(), one.shape) for one in local]

    def own_digest(self) -> str:
        """Return a digest of plain values and `own` tensors: the part of the state that may differ between ranks.

        Data-parallel ranks with equal digests have the same state, so that one rank can restore the state of another.
        """
        checksum = crc64nvme(json.dumps(self.parts.values).encode())
        for tensor in self.own:
            try:
                chunk = chunk_of(tensor, "a tensor")
            except JobFailedError:
                Layout(self.parts)  # this call raises the same error, but with the tensor's name
                raise
            if chunk is not None:
                checksum = crc64nvme(raw_bytes(chunk.local), checksum)
        return crc_text(checksum)

    def sharing(self) -> str:
        """Return which ranks have the same state as this rank, as a word of `snapshot/sharing.py`."""
        kind = "alike" if self.own else "same"
        holders = holders_of(self.parts.tensors)
        world_size = dist.get_world_size() if dist.is_initialized() else 0
        return str(Sharing.among(kind, holders, world_size))


@dataclass(frozen=True, slots=True)
class ConsistentStep:
    """A step that a rank's live state holds completely."""

    step: int
    save_id: str
    own_digest: str
    sharing: str
    world_size: int = 0
    """The only world size that the state fits; 0: it fits any world size, because all ranks hold the same state."""


class TrainingState:
    """The objects that one rank has registered with `restore`.

    Args:
        objects: the objects, by name.
        before: the registration of this process that the new one replaces; None at the first call.
        may_change: called before each optimizer step; raises an error if collectives were aborted.
        before_change: called before the state changes; waits for a running copy of the state.
        cast: keep the tensors' types at a load, and convert the saved values.
    """

    def __init__(
        self,
        objects: Mapping[str, Stateful],
        before: TrainingState | None = None,
        may_change: Callable[[], None] = lambda: None,
        before_change: Callable[[], None] = lambda: None,
        cast: bool = False,
    ) -> None:
        for name, value in objects.items():
            if not isinstance(value, Stateful):
                raise JobFailedError(
                    f"restore({name}=...): {type(value).__name__} has no state_dict() and load_state_dict()",
                    hint="Pass modules, optimizers, schedulers, or objects with these two methods.",
                )
            if _SHARDING_OPTIMIZERS & {each.__name__ for each in type(value).__mro__}:
                raise JobFailedError(
                    f"restore({name}=...): {type(value).__name__} is not supported: each rank holds a part of its "
                    "state, and its state_dict() returns the whole state only on one rank and after a collective",
                    hint="Shard with fully_shard (FSDP2) inside run.keep, and use a plain optimizer: each rank's shard "
                    "is saved. For DeepSpeed's ZeRO-1 and ZeRO-2, use keep_engine: docs/integrations.md.",
                )
            if is_distributed_optimizer(value):
                raise JobFailedError(
                    f"restore({name}=...): Megatron's distributed optimizer holds one rank's part of the state, and "
                    "does not state which part each tensor is",
                    hint="Set use_distributed_optimizer=False in DistributedDataParallelConfig and OptimizerConfig.",
                )
        self._objects, self._cast = dict(objects), cast
        self._may_change, self._before_change = may_change, before_change
        self.is_reported = False
        """Whether an optimizer has stepped since the last commit, according to step hooks. The replay of a CUDA graph
        runs no hooks, so copies cannot overlap with replayed steps."""
        self._stepped: set[int] = set()
        """Ids of the optimizers that have stepped since the last commit."""
        self._waiting = gradients.WaitingGradients()
        self._loose: gradients.LooseGradients = before._loose if before is not None else gradients.LooseGradients()
        self._mark: tuple[CapturedState, list[tuple[int, int, torch.Size]], ConsistentStep] | None = (
            before._mark if before is not None else None
        )
        if before is not None:
            before.close()
        self._taking = False
        """Whether a call of an object's `state_dict()` is running, which may read `.data` without changing the
        state."""
        self._committed_storages: set[int] | None = None
        """Cached result of `_storages`; None: not computed since the last commit."""
        self._large_values: LargeValues = before._large_values if before is not None else LargeValues()
        self._built: Built
        self._forms: Mapping[str, Form] = {}
        self._changes: Changes = {}
        # call the script's state_dict() in new and surviving processes, because it may be a collective
        captured = self.take(packed=False)
        if before is not None and before._objects.keys() == self._objects.keys():
            self._built, self._changes = before._built, before._changes
        else:
            self._built = Built(self._objects, captured.parts, captured.keys)
        self._forms = self._built.forms
        # use hooks, because fused optimizers and writes through `.data` do not increase version counters
        self._hooks = [
            value.register_step_pre_hook(functools.partial(self._about_to_change, id(value)))
            for value in self._objects.values()
            if isinstance(value, torch.optim.Optimizer)
        ]
        self._data_access = DataAccess(self._about_to_give_data)

    def close(self) -> None:
        """Remove the hooks from the optimizers and from `torch.Tensor.data`."""
        self._data_access.remove()
        for hook in self._hooks:
            hook.remove()

    def forget(self) -> None:
        """Release the references to the committed state, so that the memory is free for new objects."""
        self._mark = None

    @property
    def is_sharded(self) -> bool:
        """Whether the committed state can be used only with the present world size."""
        return self._mark is not None and self._mark[2].world_size > 0

    @property
    def tells_of_changes(self) -> bool:
        """Whether the objects include an optimizer, whose step hook reports changes of the state."""
        return bool(self._hooks)

    @property
    def may_differ(self) -> bool:
        """Whether the state may have changed since the last commit.

        Only optimizer steps count as changes. Without an optimizer, the state is compared with the commit.
        """
        return self.is_reported or (not self.tells_of_changes and self.consistent_step() is None)

    def _about_to_change(self, optimizer: int, *_: Any) -> None:
        self._may_change()
        self._mark, self.is_reported = None, True
        self._stepped.add(optimizer)
        self._before_change()

    def _about_to_give_data(self, tensor: torch.Tensor) -> None:
        """No longer treat the state as committed once the script reads `.data` of a committed tensor, because writes to
        `.data` cannot be detected."""
        if self._mark is not None and not self._taking and _storage(tensor) in self._storages():
            self._mark = None
            self._before_change()

    def _storages(self) -> set[int]:
        """Return the storage addresses of the committed tensors. Tensors in `own_digest` are left out, because the
        digest detects their changes."""
        if self._committed_storages is None and self._mark is not None:
            own = set(map(id, self._mark[0].own))
            shared = [tensor for tensor in self._mark[0].parts.tensors if id(tensor) not in own]
            self._committed_storages = {_storage(tensor) for tensor in shared} - {0}
        return self._committed_storages or set()

    def clear_gradients(self) -> None:
        """Drop the gradients and the scaler's state of an interrupted step, because they would change the repetition of
        the step."""
        for value in self._objects.values():
            if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
                value.zero_grad(set_to_none=True)
                if isinstance(value, torch.optim.Optimizer):  # remove attributes that a gradient scaler has set
                    for name in ("grad_scale", "found_inf"):
                        vars(value).pop(name, None)
            # an enabled scaler remembers which optimizers have unscaled gradients
            elif isinstance(value, torch.amp.GradScaler) and value.is_enabled():
                value._per_optimizer_states.clear()

    def existing_and_changed(self, captured: CapturedState) -> tuple[gradients.Ranges, Changes]:
        """Return which parameters have a gradient, and how training has changed the objects since they were built (see
        `built.Built.changes`).

        Args:
            captured: the present state of the objects.

        Raises:
            JobFailedError: a new process could not restore a change.
        """
        self._changes = self._built.changes(self._objects, captured.keys, captured.parameters)
        return gradients.existing(captured.parameters), self._changes

    def give_gradients(self, ranges: Sequence[Sequence[int]]) -> None:
        """Set a gradient on each parameter that had a gradient after the restored step.

        Parameters outside all optimizers get their saved gradients; all other gradients are zero.

        Args:
            ranges: indices of the parameters that had a gradient.
        """
        gradients.give_zeros(self._objects.values(), ranges)
        self._loose.give(self._objects.values())

    def accumulates(self) -> bool:
        """Return whether gradients wait for an optimizer that has not stepped since the last commit.

        A step with waiting gradients cannot be restored, because snapshots do not contain these gradients. Call this at
        the end of each step.
        """
        optimizers = [value for value in self._objects.values() if isinstance(value, torch.optim.Optimizer)]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        if any(group.get("capturable") for group in groups):
            return False  # a CUDA graph may replay optimizer steps without hooks
        if self.is_reported:
            return len(optimizers) > 1 and self._waiting.see(optimizers, self._stepped)
        return any(parameter.grad is not None for group in groups for parameter in group["params"])

    def take(self, *, packed: bool = True, step_ended: bool = False) -> CapturedState:
        """Return the state of all objects, split into tensors and plain values. Tensors are not copied.

        Args:
            packed: replace large plain values by byte tensors, as in a snapshot.
            step_ended: first copy the gradients of parameters outside all optimizers, which are part of the state.

        Raises:
            JobFailedError: a value of the state cannot be stored in a snapshot.
        """
        self._taking = True
        try:
            tree = {name: _state_of(value) for name, value in self._objects.items()}
        finally:
            self._taking = False
        parameters = gradients.parameters(
            self._objects.values()
        )  # call this after state_dict(), which reshards FSDP2's parameters
        if step_ended:
            optimizers = [value for value in self._objects.values() if isinstance(value, torch.optim.Optimizer)]
            self._loose.hold(optimizers, parameters)
        if packed:
            own_states = (torch.nn.Module, torch.optim.Optimizer)
            others = [name for name, value in self._objects.items() if not isinstance(value, own_states)]
            tree |= {name: self._large_values.pack(name, tree[name]) for name in others}
        if self._loose.values:
            tree[_LOOSE] = {str(number): value for number, value in self._loose.values.items()}
        parts = take_apart(tree, torch.Tensor)
        # refuse tensors without memory of their own, whose bytes `own_digest` could not read
        if not all(map(has_memory, {type(tensor) for tensor in parts.tensors})):
            for tensor, path in zip(parts.tensors, leaf_paths(parts.shape)[0], strict=True):
                check_memory(tensor, fqn(path))
        own = [t for name, value in self._objects.items() for t in _own(value, tree[name])]
        keys = {
            name: keys_of(tree[name]) for name, value in self._objects.items() if isinstance(value, torch.nn.Module)
        }
        return CapturedState(parts._replace(built=self._forms), own, keys, parameters)

    def data_positions(self) -> DataPositions:
        """Return the values of data loaders that must be equal on every rank (see `same_data`)."""
        large = torch.nn.Module | torch.optim.Optimizer
        return data_positions_of(
            (name, None if isinstance(value, large) else value.state_dict()) for name, value in self._objects.items()
        )

    def nbytes(self) -> int:
        """Return the size of a snapshot in bytes, including an estimate for optimizer state that does not exist yet."""
        optimizers = [value for value in self._objects.values() if isinstance(value, torch.optim.Optimizer)]
        return Layout(self.take().parts).plan.nbytes + sum(map(bytes_to_come, optimizers))

    def load(self, snapshots: Sequence[Snapshot], *, lean: bool = False) -> None:
        """Load verified snapshots into the objects. Live tensors are filled in place.

        Args:
            snapshots: this rank's snapshot, or the snapshots of all ranks if they were saved with another world size.
            lean: read only the parts of the snapshots that this rank needs.

        Raises:
            JobFailedError: the snapshots do not fit the objects.
        """
        names = list(snapshots[0].plan.shape[1])
        if set(names) - {_LOOSE} != set(self._objects):
            raise JobFailedError(
                f"the snapshot holds the objects {sorted(names)}, but this rank has registered {sorted(self._objects)}",
                hint="Every rank must call restore() with the same names.",
            )
        self._mark = None
        changes = snapshots[0].extras.get("changes", {})
        self._built.regroup(self._objects, changes)
        self._built.set_flags(self._objects, changes)  # set flags before `take`, which puts frozen tensors first
        captured = self.take(packed=False)
        parts, keys = captured.parts, captured.keys
        found = list(snapshots)
        items = _items(found)

        def saved(name: str) -> Item | None:
            if name not in items and len(found) == 1 and found[0].others is not None:  # the sharding has changed
                found.extend(found[0].others())
                items.update(_items(found))
            return items.get(name)

        self._built.reform(self._objects, parts, saved, cast=self._cast)
        apart = _set_apart(parts.tensors)
        try:
            tree = fill(parts, found, lean=lean, like=self._like(), kept=keys)
        except RuntimeError as error:
            raise self._does_not_take("the state", error) from error
        for tensor, shared in apart:
            if torch.equal(_bytes(tensor), _bytes(shared)):
                tensor.data = shared
        self._loose.values = {int(number): value for number, value in tree.get(_LOOSE, {}).items()}
        self._give(tree, cast=self._cast)

    def _give(self, tree: Mapping[str, Any], *, cast: bool = False) -> None:
        """Load each object's part of `tree`. Skip modules whose state is only tensors that are filled already.

        Args:
            tree: the state of each object, by name.
            cast: let optimizers convert the state to the parameters' types.
        """
        for name, value in self._objects.items():
            if isinstance(value, torch.nn.Module) and _is_filled(value, tree[name]):
                continue
            try:
                if isinstance(value, torch.optim.Optimizer):
                    load_state(name, value, tree[name], cast=cast)
                else:
                    value.load_state_dict(unpack(tree[name]))
            except (RuntimeError, ValueError, KeyError) as error:
                raise self._does_not_take(name, error) from error

    def _like(self) -> Like:
        """Return a function that takes the path of a saved tensor, and returns the parameter to which it belongs.

        The function returns None unless the tensor is a gradient, or an optimizer's state for a parameter.
        """
        optimizers = {name: value for name, value in self._objects.items() if isinstance(value, torch.optim.Optimizer)}
        numbered = {name: gradients.parameters([value]) for name, value in optimizers.items()}
        every = gradients.parameters(self._objects.values())

        def parameter(path: Path) -> torch.Tensor | None:
            match path:
                case (str(name), "state", int(number), key) if name in numbered and key != "step":
                    return numbered[name][number] if number < len(numbered[name]) else None
                case (str(name), number) if name == _LOOSE:
                    return every[int(number)]
            return None

        return parameter

    def adopt(self) -> None:
        """Load the last committed state of the earlier objects that these objects replace in this process.

        Nothing is loaded if the earlier objects have no committed state, or have changed since the commit.

        Raises:
            JobFailedError: the new objects do not fit the committed state.
        """
        if self._mark is None:
            return
        committed, versions, consistent = self._mark
        if committed.versions() != versions or committed.own_digest() != consistent.own_digest:
            return
        tree = put_together(committed.parts.shape, committed.parts.tensors, committed.parts.values)
        if tree.keys() - {_LOOSE} != self._objects.keys():
            return
        self._built.regroup(self._objects, self._changes)
        saved = {item.fqn: item for item in Layout(committed.parts).plan.items}
        self._built.reform(self._objects, self.take(packed=False).parts, saved.get)
        self._give(tree)
        now = self.take()
        if (now.parts.shape, now.parts.values) == (committed.parts.shape, committed.parts.values):
            self.commit(now, consistent)

    def _does_not_take(self, name: str, error: Exception) -> JobFailedError:
        return JobFailedError(
            f"the job's saved state cannot be loaded into {name} of this rank: {error}",
            hint="Build the same models and optimizers on every rank.",
        )

    def set_flags(self, changes: Changes) -> None:
        """Set `requires_grad` and `training` to the values in `changes`."""
        self._built.set_flags(self._objects, changes)

    def commit(self, captured: CapturedState, consistent: ConsistentStep) -> None:
        """Record that the objects now hold the complete step `consistent.step`."""
        self._mark, self.is_reported = (captured, captured.versions(), consistent), False
        self._stepped.clear()
        self._committed_storages = None

    def consistent_step(self) -> ConsistentStep | None:
        """Return the last committed step; None if the state may have changed since the commit."""
        if self._mark is None:
            return None
        committed, versions, consistent = self._mark
        now = self.take()
        same = (
            now.parts.shape == committed.parts.shape
            and now.parts.values == committed.parts.values
            and now.versions() == versions
            # only the digest reveals a write through `.data` in a forward pass
            and now.own_digest() == consistent.own_digest
        )
        return consistent if same else None

    def digest(self) -> str:
        """Return a SHA-256 digest of the whole state. Ranks or runs with equal digests have bitwise equal states."""
        captured = self.take()
        digest = hashlib.sha256(json.dumps([captured.parts.shape, captured.parts.values]).encode())
        for local in Layout(captured.parts).locals:
            digest.update(raw_bytes(local))
        return digest.hexdigest()


def raw_bytes(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    """Return the bytes of this rank's part of `tensor`. A contiguous tensor on the CPU is not copied."""
    flat = local_of(tensor).cpu().contiguous()
    nbytes = flat.numel() * flat.element_size()
    view = (ctypes.c_char * nbytes).from_address(flat.data_ptr()) if nbytes else (ctypes.c_char * 0)()
    view._keeps_alive = flat  # type: ignore[attr-defined]  # without this, a copy would be freed while the view exists
    return view


def _own(value: Stateful, state: Any) -> list[torch.Tensor]:
    """Return the tensors of one object's state that may differ between ranks, even with data parallelism.

    Args:
        value: the object.
        state: the object's state.
    """
    if isinstance(value, torch.optim.Optimizer):
        return []
    if isinstance(value, torch.nn.Module):
        shared = {name for name, _ in value.named_parameters(remove_duplicate=False)}
        return [entry for name, entry in state.items() if name not in shared and isinstance(entry, torch.Tensor)]
    return list(take_apart(state, torch.Tensor).tensors)


def _state_of(value: Stateful) -> Any:
    """Return an object's `state_dict()`; for a module, if possible, with its parameters instead of new tensors."""
    if isinstance(value, torch.nn.Module):
        try:
            return dict(value.state_dict(keep_vars=True))
        except TypeError:
            # the script's own state_dict() may lack the parameter `keep_vars`
            pass
    state = value.state_dict()
    return dict(state) if isinstance(value, torch.nn.Module) else state


def _items(snapshots: Sequence[Snapshot]) -> dict[str, Item]:
    """Return the snapshots' items by tensor name. If several snapshots have a tensor, use the item of the first one."""
    return {item.fqn: item for snapshot in reversed(snapshots) for item in snapshot.plan.items}


def _is_filled(module: torch.nn.Module, state: Any) -> bool:
    """Return whether `state` has only tensors of the module itself, which have been filled in place.

    The result is False if the script has overridden `state_dict()` to return copies or other values.
    """
    own = {id(tensor) for tensor in tensors_of(module)}
    parts = take_apart(state, torch.Tensor)
    return not parts.values and all(id(tensor) in own for tensor in parts.tensors)


def _set_apart(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Allocate separate memory for each tensor that shares memory with another tensor.

    Two tensors may share memory after `weight.data = average` in an interrupted step, but must be filled separately.

    Returns:
        Each tensor that got separate memory, with an alias of the tensor's old memory. If the tensor and the alias have
        equal bytes after both are filled, the tensors are tied weights, and the caller lets them share memory again.
    """
    plain = {
        id(t): t for t in tensors if type(t) in (torch.Tensor, torch.nn.Parameter) and t.is_contiguous() and t.nbytes
    }
    apart, end = [], 0
    for tensor in sorted(plain.values(), key=lambda tensor: (tensor.data_ptr(), -tensor.nbytes)):
        start = tensor.data_ptr()
        if start < end:
            apart.append((tensor, tensor.detach()))
        end = max(end, start + tensor.nbytes)
    for tensor, _ in apart:
        tensor.data = torch.empty_like(tensor)
    return apart


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if the tensor has no storage."""
    try:
        return int(getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # the tensor is a compiler's, or is made of inner tensors
        return 0
