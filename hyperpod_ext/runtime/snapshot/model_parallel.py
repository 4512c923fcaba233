"""Model parts in plain tensors, as in Megatron-core: this rank's part, and the ranks with the same part.

Megatron's shards have equal names, and often equal shapes, so only Megatron's groups distinguish shards from replicas.
Megatron is not imported here: without an import by the script, there are no such parts.
"""

from __future__ import annotations

import gc
import sys
from typing import Any, NamedTuple

import torch.distributed as dist


class HeldShard(NamedTuple):
    """One part of the model."""

    name: str
    """`tensor 1 of 2`: suffix of all tensor names, because equal names are different tensors on other ranks."""
    ranks: frozenset[int]
    """Ranks that hold the part."""


def held_shard() -> HeldShard | None:
    """Return this rank's part of a model split by Megatron; None: not split, or split only by DTensors."""
    groups: Any = sys.modules.get("megatron.core.parallel_state")
    if groups is None or not groups.model_parallel_is_initialized():
        return None
    places = [
        ("tensor", groups.get_tensor_model_parallel_rank(), groups.get_tensor_model_parallel_world_size()),
        ("pipeline", groups.get_pipeline_model_parallel_rank(), groups.get_pipeline_model_parallel_world_size()),
        ("expert", groups.get_expert_model_parallel_rank(), groups.get_expert_model_parallel_world_size()),
    ]
    name = ", ".join(f"{kind} {rank + 1} of {size}" for kind, rank, size in places if size > 1)
    if not name:
        return None
    if places[-1][2] > 1:  # experts differ between data parallel ranks, too
        return HeldShard(name, frozenset([dist.get_rank()]))
    group = groups.get_data_parallel_group(with_context_parallel=True)
    return HeldShard(name, frozenset(dist.get_process_group_ranks(group)))


def is_distributed_optimizer(optimizer: object) -> bool:
    """Return whether it is, or is inside, Megatron's distributed optimizer: state of one rank under shared names."""
    module = sys.modules.get("megatron.core.optimizer.distrib_optimizer")
    if module is None:
        return False
    return any(
        optimizer is one or optimizer is one.optimizer or one in getattr(optimizer, "chained_optimizers", ())
        for one in gc.get_objects()
        if issubclass(type(one), module.DistributedOptimizer)
    )
