"""Parts of a model in plain tensors, as Megatron-core has them: which part this rank holds, and who holds the same.

Megatron's shards have the names, and often the shapes, of their neighbours', so nothing about a tensor tells them from
replicas. Megatron's own groups do. It is not imported here: unless the script has done so, there are no such parts.
"""

from __future__ import annotations

import gc
import sys
from typing import Any, NamedTuple

import torch.distributed as dist


class HeldShard(NamedTuple):
    """Of all the model's parts, one."""

    name: str
    """`tensor 1 of 2`; in the names of all tensors, as two ranks' tensors of one name are not the same."""
    ranks: frozenset[int]
    """Who holds it."""


def held_shard() -> HeldShard | None:
    """This rank's part of a model that Megatron has taken apart; None: every rank holds all of it, or DTensors say."""
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
    if places[-1][2] > 1:  # experts are parts of what data parallelism has alike otherwise
        return HeldShard(name, frozenset([dist.get_rank()]))
    group = groups.get_data_parallel_group(with_context_parallel=True)
    return HeldShard(name, frozenset(dist.get_process_group_ranks(group)))


def is_distributed_optimizer(optimizer: object) -> bool:
    """Whether it is Megatron's distributed optimizer, or one below: its state is one rank's part under shared names."""
    module = sys.modules.get("megatron.core.optimizer.distrib_optimizer")
    if module is None:
        return False
    return any(
        optimizer is one or optimizer is one.optimizer or one in getattr(optimizer, "chained_optimizers", ())
        for one in gc.get_objects()
        if issubclass(type(one), module.DistributedOptimizer)
    )
