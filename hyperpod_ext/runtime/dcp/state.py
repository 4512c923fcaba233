"""Convert torch's save plans to the contents of our snapshots, and our snapshots' layouts to torch's metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.snapshot.image import Chunk
from hyperpod_ext.runtime.snapshot.layout_plan import Plan
from hyperpod_ext.runtime.snapshot.tree import Parts, put_together, take_apart

Path = tuple[str | int, ...]
ShardKey = tuple[str, tuple[int, ...]]
"""A shard: name of the tensor, and offsets of the shard in it."""


# --- saving ---------------------------------------------------------------------------------------


def parts_of(items: Iterable[WriteItem], planner: SavePlanner, paths: Mapping[str, Path]) -> Parts:
    """Return the values of `items` in the tree from which DCP has flattened them.

    Args:
        items: the items of this rank's save plan.
        planner: returns the values of the items.
        paths: path in the tree for each flat name.

    Raises:
        JobFailedError: a value is neither a tensor nor writable as JSON, or this rank has several shards of a tensor.
    """
    leaves: dict[Path, Any] = {}
    for item in items:
        name = item.index.fqn
        leaf = _chunk(item, planner) if item.type is not WriteItemType.BYTE_IO else _value(item, planner)
        path = paths.get(name, (name,))
        if path in leaves:
            raise JobFailedError(f"{name} has several shards on one rank, but a snapshot holds one shard of a tensor")
        leaves[path] = leaf
    tree = _nest(leaves)
    if tree is None:  # keep flat names: this rank has only some elements of a list
        tree = {".".join(map(str, path)): leaf for path, leaf in leaves.items()}
    return take_apart(tree, Chunk)


def is_unsharded(parts: Parts) -> bool:
    """Return whether this rank has every tensor completely, as in plain data parallelism."""
    return all(tuple(chunk.local.shape) == chunk.shape for chunk in parts.tensors)


def _chunk(item: WriteItem, planner: SavePlanner) -> Chunk:
    data = item.tensor_data
    local = planner.resolve_data(item)
    if data is None or not isinstance(local, torch.Tensor):
        raise JobFailedError(
            f"{item.index.fqn} is planned as a tensor, but {type(planner).__name__} returned no tensor for it",
            hint="Derive the planner from DefaultSavePlanner.",
        )
    local = local.detach()
    if tuple(local.shape) != tuple(data.chunk.sizes):
        raise JobFailedError(
            f"{item.index.fqn} has shape {tuple(local.shape)}, but the save plan has {tuple(data.chunk.sizes)} for it",
            hint="Correct the planner, or do not change the tensor's shape while it is saved.",
        )
    return Chunk(local, tuple(data.size), tuple(data.chunk.offsets))


def _value(item: WriteItem, planner: SavePlanner) -> Any:
    # use `lookup_object`, which DefaultSavePlanner has, because `resolve_data` would pickle the value
    look_up = getattr(planner, "lookup_object", None)
    if look_up is None:
        raise JobFailedError(
            f"{item.index.fqn} is not a tensor, and {type(planner).__name__} has no method lookup_object to return it",
            hint="Derive the planner from DefaultSavePlanner.",
        )
    return look_up(item.index)


def _nest(leaves: Mapping[Path, Any]) -> Any:
    """Return the tree with the given leaves; None if a list of the tree lacks elements.

    A node whose keys are numbers becomes a list.
    """
    if () in leaves:
        return leaves[()]
    below: dict[str | int, dict[Path, Any]] = {}
    for (key, *rest), leaf in leaves.items():
        below.setdefault(key, {})[tuple(rest)] = leaf
    tree = {key: _nest(inner) for key, inner in below.items()}
    if any(tree_of_key is None and () not in below[key] for key, tree_of_key in tree.items()):
        return None
    if any(isinstance(key, int) for key in tree):
        return [tree[index] for index in range(len(tree))] if set(tree) == set(range(len(tree))) else None
    return tree


# --- loading --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contents:
    """The contents of a step, gathered from the snapshots of all its ranks."""

    metadata: Metadata
    holders: Mapping[ShardKey, Sequence[tuple[int, int]]]
    """For each shard, the snapshots that have the shard: the snapshot's rank and the index of its item."""
    values: Mapping[int, Mapping[str, Any]]
    """The plain values (all values except tensors) of each saved rank, by name."""

    def value(self, name: str, rank: int) -> Any:
        """Return the plain value `name` of `rank`'s snapshot, or else of the lowest rank's snapshot that has it."""
        ranks = [rank, *sorted(self.values)]
        return next(self.values[one][name] for one in ranks if name in self.values.get(one, ()))


def contents_of(parts: Mapping[int, tuple[Plan, Sequence[Any]]]) -> Contents:
    """Return the contents of a step. `parts`: the layout plan and the plain values of each rank's snapshot."""
    tensors: dict[str, TensorStorageMetadata] = {}
    holders: dict[ShardKey, list[tuple[int, int]]] = {}
    values: dict[int, dict[str, Any]] = {}
    paths: dict[str, Path] = {}
    for rank, (plan, plain) in sorted(parts.items()):
        values[rank], found = _values(plan, plain)
        paths = {**found, **paths}
        for index, item in enumerate(plan.items):
            known = holders.setdefault((item.fqn, item.offsets), [])
            if not known:
                metadata = tensors.setdefault(item.fqn, _tensor(item.dtype, item.shape))
                metadata.chunks.append(ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes)))
            known.append((rank, index))
    plain_names = {name for each in values.values() for name in each}
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        name: BytesStorageMetadata() for name in sorted(plain_names)
    }
    described.update(tensors)
    return Contents(Metadata(described, planner_data=paths), holders, values)


def _tensor(dtype: str, shape: tuple[int, ...]) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, dtype)), torch.Size(shape), [])


_TENSOR = torch.empty(0)


def _values(plan: Plan, plain: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the plain values by torch's flat names, and for each flat name its path in the tree."""
    count = sum(1 for node in plan.shape if node == "T")
    flat, paths = flatten_state_dict(put_together(plan.shape, [_TENSOR] * count, plain))
    return {name: value for name, value in flat.items() if value is not _TENSOR}, paths
