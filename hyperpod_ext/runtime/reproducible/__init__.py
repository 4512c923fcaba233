"""Gradient sums that do not depend on their order: the same bits for any number of ranks and any history of them."""

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
    """Wrap `module` like DistributedDataParallel: a plain module, or one after `fully_shard` (FSDP2, HSDP).

    init_sync: send rank 0's parameters and buffers to all ranks first; FSDP2 modules are left as they are.

    Raises:
        JobFailedError: the module has parts whose results depend on the number of ranks, or an unknown layout.
    """
    check(Feature.REPRODUCIBLE_DDP)
    if any(hasattr(part, "_get_fsdp_state") for part in module.modules()):
        check(Feature.REPRODUCIBLE_FSDP2)
        from hyperpod_ext.runtime.reproducible.sharded import Sharded  # FSDP2 takes a second to import

        return Sharded(module)
    from hyperpod_ext.runtime.reproducible.replicated import Replicated

    return Replicated(module, init_sync=init_sync)


def seeded(step: Step, seed: int) -> Iterator[tuple[Any, float]]:
    """Yield each (micro-batch, weight) of `step`; before each, seed torch's, Python's and numpy's global generators
    from (seed, step, slot), so that dropout is the same on any rank."""
    for slot, (batch, weight) in zip(step.slots, step, strict=True):
        seed_step(seed, step.number, -2 - slot.index)  # ranks count from 0, and -1 is taken for building
        yield batch, weight
