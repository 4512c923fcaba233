"""Models that Megatron-core splits into plain tensors: this rank's part, and the ranks that hold the same part.

The shards of a tensor have the same name on all ranks, and often the same shape. Whether two ranks hold different
shards or replicas therefore shows only in Megatron's process groups. This file does not import Megatron: if the script
has not imported Megatron, Megatron has not split a model.
"""

from __future__ import annotations

import gc
import sys
from typing import Any, NamedTuple

import torch.distributed as dist


class HeldShard(NamedTuple):
    """This rank's part of a model that Megatron has split."""

    name: str
    """Name of the part, such as `tensor 1 of 2`. The name is a suffix to all tensor names, because Megatron gives the
    tensors of all parts the same names."""
    ranks: frozenset[int]
    """Ranks that hold this part, including this rank."""


def held_shard() -> HeldShard | None:
    """Return this rank's part of a model that Megatron has split; None if Megatron has not split the model."""
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
    if places[-1][2] > 1:  # with expert parallelism, data-parallel ranks hold different experts, too
        return HeldShard(name, frozenset([dist.get_rank()]))
    group = groups.get_data_parallel_group(with_context_parallel=True)
    return HeldShard(name, frozenset(dist.get_process_group_ranks(group)))


def is_distributed_optimizer(optimizer: object) -> bool:
    """Return whether an optimizer is, contains or is wrapped by Megatron's distributed optimizer.

    Megatron's distributed optimizer holds only one rank's part of the state, under the same names as on other ranks.
    """
    module = sys.modules.get("megatron.core.optimizer.distrib_optimizer")
    if module is None:
        return False
    return any(
        optimizer is one or optimizer is one.optimizer or one in getattr(optimizer, "chained_optimizers", ())
        for one in gc.get_objects()
        if issubclass(type(one), module.DistributedOptimizer)
    )
