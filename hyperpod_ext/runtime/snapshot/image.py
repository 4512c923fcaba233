"""The image of a snapshot: all tensors of one rank, laid out in memory as a `.distcp` file.

The layout is planned once; each later save only copies values. Each tensor's bytes are inside the zip archive that
`torch.save` would write, so plain `torch.distributed.checkpoint.load` can read the image as a file.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.snapshot.layout_plan import DTYPE_BYTES, Item, Plan
from hyperpod_ext.runtime.snapshot.model_parallel import held_shard
from hyperpod_ext.runtime.snapshot.tree import Form, Parts, Path, fqn, leaf_paths
from hyperpod_ext.runtime.snapshot.zip_file import ALIGNMENT, Frame, frame


class Chunk(NamedTuple):
    """This rank's shard of a tensor; the whole tensor if it is not sharded."""

    local: torch.Tensor
    shape: tuple[int, ...]
    """Shape of the whole tensor, over all ranks."""
    offsets: tuple[int, ...]
    """Index of the shard's first element in the whole tensor, in each dimension."""


def chunk_of(tensor: torch.Tensor | Chunk, name: str) -> Chunk | None:
    """Return this rank's shard of a tensor; None if this rank has no elements of it.

    Args:
        tensor: a tensor; a `Chunk` is only checked, and returned unchanged.
        name: the tensor's name, for errors.

    Raises:
        JobFailedError: the tensor is sparse, quantised, made of inner tensors, or a DTensor with a Partial placement.
    """
    given, tensor = (tensor, tensor.local) if isinstance(tensor, Chunk) else (None, tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or dtype not in DTYPE_BYTES:
        raise JobFailedError(
            f"{name} is a tensor of type {tensor.dtype} and layout {tensor.layout}; a snapshot holds dense tensors",
            hint="Convert the tensor in state_dict(), or leave it out.",
        )
    if given is not None:
        return given if tensor.numel() > 0 or 0 in given.shape else None
    if not is_dtensor(tensor):
        check_memory(tensor, name)
        return Chunk(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim())
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor  # a DTensor, whose type is not imported here
    if any(placement.is_partial() for placement in sharded.placements):
        raise JobFailedError(
            f"{name} has the placements {sharded.placements}: the values of its ranks are not summed yet",
            hint="Redistribute the tensor to Replicate() or Shard() before it is saved.",
        )
    local = sharded.detach().to_local()
    check_memory(local, name)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, sharded.device_mesh, sharded.placements)
    if local.numel() == 0 and tensor.numel() > 0:
        return None
    assert tuple(sizes) == tuple(local.shape), f"{name}: {sizes} is not {local.shape}"
    return Chunk(local, tuple(tensor.shape), tuple(offsets))


def form_of(tensor: torch.Tensor, name: str = "a tensor") -> Form:
    """Return type, shape and strides of a tensor. For a DTensor: type and global shape, without strides.

    Raises:
        JobFailedError: a restore could not fill the tensor (see `strides_of`).
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Form(dtype, tuple(tensor.shape), None if is_dtensor(tensor) else strides_of(tensor, name))


def strides_of(tensor: torch.Tensor, name: str = "a tensor") -> tuple[int, ...] | None:
    """Return the strides of a tensor in elements; None if a new tensor of this shape would have the same strides.

    Raises:
        JobFailedError: elements share memory, not only by `expand`, so a restore could not fill the tensor.
    """
    strides = tensor.stride()
    if tensor.numel() == 0 or (tensor.is_contiguous() and not _is_ambiguous(tensor)):
        return None
    reach = 0
    for stride, size in sorted(zip(strides, tensor.shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        if stride <= reach:
            raise JobFailedError(
                f"{name} is a view whose elements share memory (shape {tuple(tensor.shape)}, strides {strides}); "
                "a restore cannot fill it",
                hint="Call .contiguous() on the tensor when it is built, or leave it out of the state.",
            )
        reach += stride * (size - 1)
    return strides


def _is_ambiguous(tensor: torch.Tensor) -> bool:
    """Return whether a contiguous tensor may have the memory format `channels_last`, such as a 1x1 kernel.

    For a contiguous tensor, only the strides of dimensions of size 1 distinguish `channels_last` from the default.
    """
    return tensor.dim() in (4, 5) and tensor.stride() != torch.empty(tensor.shape, device="meta").stride()


def once(tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return a view of `tensor` without the repetitions that `expand` has made in `view`.

    Args:
        tensor: the tensor to narrow.
        view: a tensor of the same shape. In each dimension in which the stride of `view` is 0, only the first index is
            kept.
    """
    for dimension, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        tensor = tensor.narrow(dimension, 0, 1) if stride == 0 and size > 1 else tensor
    return tensor


def empty(form: Form, device: torch.device | None = None) -> torch.Tensor:
    """Return a new, uninitialized tensor with the type, shape and strides of `form`."""
    dtype = getattr(torch, form.dtype)
    if form.strides is None:
        return torch.empty(form.shape, dtype=dtype, device=device)
    return torch.empty_strided(form.shape, form.strides, dtype=dtype, device=device)


def has_memory(kind: type) -> bool:
    """Return whether tensors of this type have memory of their own.

    Tensors made of inner tensors have no memory of their own, for example those of torchao's 8-bit optimizers.
    """
    return not hasattr(kind, "__tensor_flatten__") or _is_dtensor_class(kind)


def check_memory(tensor: torch.Tensor, name: str) -> None:
    """Raise JobFailedError if `tensor` is made of inner tensors."""
    if not has_memory(type(tensor)):
        raise JobFailedError(
            f"{name} is a {type(tensor).__qualname__}, which is made of other tensors; a snapshot holds dense tensors",
            hint="Use optimizers and layers with plain tensors as state, such as the 8-bit optimizers of bitsandbytes.",
        )


def is_dtensor(tensor: Any) -> bool:
    """Return whether `tensor` is a DTensor, without importing DTensor's module."""
    return _is_dtensor_class(type(tensor))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor; any other tensor detached."""
    plain: Any = tensor.detach()  # may be a DTensor, whose type is not imported here
    local: torch.Tensor = plain.to_local() if is_dtensor(plain) else plain
    return local


def _is_dtensor_class(kind: type) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


def part_name() -> str:
    """Return a suffix for tensor names: this rank's part of a model split by Megatron; empty if it is not split."""
    part = held_shard()
    return f" ({part.name})" if part else ""


def is_frozen(tensor: Any) -> bool:
    """Return whether `tensor` is a parameter that is not trained."""
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


def holders_of(tensors: Sequence[Any]) -> frozenset[int] | None:
    """Return the ranks that hold the same shard of every tensor as this rank; None: all ranks.

    The ranks are those in the DTensors' device meshes and in Megatron's process groups.
    """
    part = held_shard()
    held: frozenset[int] | None = part and part.ranks
    seen: set[tuple[int, Any]] = set()
    for tensor in tensors:
        if not is_dtensor(tensor):
            continue
        mesh, placements = tensor.device_mesh, tensor.placements
        if (id(mesh), placements) in seen:
            continue
        seen.add((id(mesh), placements))
        here = mesh.get_coordinate()
        if here is None:
            return frozenset([dist.get_rank()])
        replicas = tuple(slice(None) if p.is_replicate() else at for p, at in zip(placements, here, strict=True))
        ranks = frozenset(mesh.mesh[replicas].flatten().tolist())
        held = ranks if held is None else held & ranks
    return held


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the names of the tensors at `paths`.

    Raises:
        JobFailedError: two tensors have the same name, such as the key `a.b` and the key `b` in `a`, so that a restore
            could not distinguish the tensors.
    """
    seen: set[str] = set()
    names = list(map(fqn, paths))
    for name in names:
        if name in seen:
            raise JobFailedError(
                f"two tensors of the state are named {name}", hint="Use no dots in the keys of a state_dict()."
            )
        seen.add(name)
    return names


def _cannot_change(name: str, built: Form, form: Form) -> JobFailedError:
    return JobFailedError(
        f"{name} was built as {built.dtype} of shape {built.shape}, and is {form.dtype} of shape {form.shape} now; "
        "a sharded tensor cannot be restored after such a change",
        hint="Build the tensor with the type and shape that training uses.",
    )


class Layout:
    """The plan of a snapshot's image, with this rank's live tensor for each item of the plan."""

    def __init__(self, parts: Parts) -> None:
        paths, _ = leaf_paths(parts.shape)
        names = _names(paths)
        items, frames, locals_ = [], [], []
        end, frames_of = 0, {}
        whose = part_name()
        order = [*range(len(paths))]
        order.sort(
            key=lambda index: not is_frozen(parts.tensors[index])
        )  # put frozen parameters first, because they are copied only once
        for index in order:
            tensor = parts.tensors[index]
            chunk = chunk_of(tensor, names[index])
            if chunk is None:
                continue
            key = (chunk.local.dtype, tuple(chunk.local.shape))
            if key not in frames_of:
                frames_of[key] = _frame(*key)
            around = frames_of[key]
            nbytes = chunk.local.numel() * chunk.local.element_size()
            start = -(-end // ALIGNMENT) * ALIGNMENT
            data = start + len(around.prefix)
            end = data + nbytes + len(around.suffix)
            dtype = str(chunk.local.dtype).removeprefix("torch.")
            sizes = tuple(chunk.local.shape)
            name = names[index] + whose
            is_plain = isinstance(tensor, torch.Tensor) and not is_dtensor(tensor)
            strides = strides_of(chunk.local, name) if is_plain else None
            built = parts.built.get(names[index])
            if built == (dtype, chunk.shape, strides):
                built = None
            if built is not None and not is_plain:
                raise _cannot_change(name, built, Form(dtype, chunk.shape))
            items.append(
                Item(index, name, dtype, chunk.shape, chunk.offsets, sizes, start, data, nbytes, end, strides, built)
            )
            frames.append(around)
            locals_.append(chunk.local)
        self.plan = Plan(parts.shape, tuple(items), max(end, 1))
        self.locals = locals_
        """This rank's live tensors, one for each item of the plan."""
        self.frozen = sum(is_frozen(parts.tensors[item.tensor]) for item in items)
        """Number of items that are frozen parameters, which are the first items."""
        self._frames = frames

    def write_frames(self, image: memoryview) -> None:
        """Write all bytes of a snapshot except the tensors' values, that is, the zip archives around the values.

        This method is called once for each slot (shared memory for one snapshot).
        """
        end = 0
        for item, around in zip(self.plan.items, self._frames, strict=True):
            image[end : item.start] = bytes(item.start - end)  # fill gaps with zeros: equal states get equal bytes
            image[item.start : item.data] = around.prefix
            image[item.data + item.nbytes : item.end] = around.suffix
            end = item.end


def views(plan: Plan, buffer: Any, start: int = 0) -> list[torch.Tensor]:
    """Return a tensor for each item of a snapshot. The tensors share the memory of `buffer`.

    Args:
        plan: layout of the snapshot.
        buffer: memory that contains the snapshot's bytes.
        start: byte offset of the snapshot in `buffer`.
    """
    image = torch.frombuffer(buffer, dtype=torch.uint8, count=plan.nbytes, offset=start)
    return [_view(image[item.data : item.data + item.nbytes], item) for item in plan.items]


def view(buffer: Any, item: Item) -> torch.Tensor:
    """Return a tensor for an item that shares the memory of `buffer`, which contains only the item's values."""
    raw = torch.frombuffer(buffer, dtype=torch.uint8) if item.nbytes else torch.empty(0, dtype=torch.uint8)
    return _view(raw, item)


def _view(raw: torch.Tensor, item: Item) -> torch.Tensor:
    dtype = getattr(torch, item.dtype)
    if item.nbytes == 0:
        return torch.empty(item.sizes, dtype=dtype)
    return raw.view(dtype).view(item.sizes)


# --- the pickle inside each archive ---------------------------------------------------------------


class _Storage:
    """Placeholder for a tensor's storage in the pickle; PyTorch stores the bytes outside of the pickle."""

    def __init__(self, persistent_id: tuple[Any, ...]) -> None:
        self.persistent_id = persistent_id


class _Tensor:
    """An object whose pickle is the pickle that `torch.save` writes for a tensor of this type and shape."""

    def __init__(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
        self._dtype, self._sizes = dtype, sizes

    def __reduce__(self) -> tuple[Any, ...]:
        numel = torch.Size(self._sizes).numel()
        strides = torch.empty(self._sizes, device="meta").stride()
        # do not call `OrderedDict[str, Any]()`: it sets `__orig_class__`, and torch.load(weights_only=True) would fail
        hooks: OrderedDict[str, Any] = OrderedDict()
        legacy = torch.storage._dtype_to_storage_type_map().get(self._dtype)
        if legacy is not None:
            storage = _Storage(("storage", getattr(torch, legacy), "0", "cpu", numel))
            return torch._utils._rebuild_tensor_v2, (storage, 0, self._sizes, strides, False, hooks)
        storage = _Storage(("storage", torch.UntypedStorage, "0", "cpu", numel * self._dtype.itemsize))
        return torch._utils._rebuild_tensor_v3, (storage, 0, self._sizes, strides, False, hooks, self._dtype)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.persistent_id if isinstance(obj, _Storage) else None


def _frame(dtype: torch.dtype, sizes: tuple[int, ...]) -> Frame:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(_Tensor(dtype, sizes))
    return frame(buffer.getvalue(), torch.Size(sizes).numel() * dtype.itemsize)
