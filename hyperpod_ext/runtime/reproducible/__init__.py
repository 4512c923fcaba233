"""Sum gradients independently of the order of summation, so that results are the same bits for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from hyperpod_ext.runtime.reproducible.wrapped import Reproducible
from hyperpod_ext.runtime.state.seeding import seed_step
from hyperpod_ext.runtime.torch_requirements.private_names import Feature, check

if TYPE_CHECKING:
    from hyperpod_ext.runtime.data.loader import Step

__all__ = ["Reproducible", "reproducible", "seeded"]


def reproducible(module: torch.nn.Module, *, init_sync: bool = True) -> Reproducible:
    """Wrap `module` for reproducible data parallelism, in place of DistributedDataParallel.

    Args:
        module: a plain module, or a module after `fully_shard` (FSDP2, HSDP).
        init_sync: broadcast rank 0's parameters and buffers to all ranks first, except for FSDP2 modules.

    Raises:
        JobFailedError: the module has submodules whose results depend on the number of ranks, or its sharding is
            unknown.
    """
    check(Feature.REPRODUCIBLE_DDP)
    if any(hasattr(part, "_get_fsdp_state") for part in module.modules()):
        check(Feature.REPRODUCIBLE_FSDP2)
        # import here, because importing FSDP2 takes a second
        from hyperpod_ext.runtime.reproducible.sharded import Sharded

        return Sharded(module)
    from hyperpod_ext.runtime.reproducible.replicated import Replicated

    return Replicated(module, init_sync=init_sync)


def seeded(step: Step, seed: int) -> Iterator[tuple[Any, float]]:
    """Yield each pair of micro-batch and weight in `step`, and seed the global random generators before each pair.

    The generators of torch, Python and numpy get a seed that depends on `seed`, the step and the micro-batch's slot.
    The seed does not depend on the rank, so dropout for a micro-batch is the same on any rank.
    """
    for slot, (batch, weight) in zip(step.slots, step, strict=True):
        # use numbers below -1 in place of a rank, because ranks count from 0, and -1 seeds the building of models
        seed_step(seed, step.number, -2 - slot.index)
        yield batch, weight
