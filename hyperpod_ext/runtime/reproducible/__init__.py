"""Gradient sums that do not depend on the order of summation, so that any number or history of ranks has the same
bits."""

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
    """Wrap `module` as DistributedDataParallel does. The module may be plain, or one after `fully_shard` (FSDP2, HSDP).

    init_sync: whether to send rank 0's parameters and buffers to all ranks first. Has no effect on FSDP2 modules.

    Raises:
        JobFailedError: the module has parts whose results depend on the number of ranks, or its layout is unknown.
    """
    check(Feature.REPRODUCIBLE_DDP)
    if any(hasattr(part, "_get_fsdp_state") for part in module.modules()):
        check(Feature.REPRODUCIBLE_FSDP2)
        # import it here, because FSDP2 takes a second to import
        from hyperpod_ext.runtime.reproducible.sharded import Sharded

        return Sharded(module)
    from hyperpod_ext.runtime.reproducible.replicated import Replicated

    return Replicated(module, init_sync=init_sync)


def seeded(step: Step, seed: int) -> Iterator[tuple[Any, float]]:
    """Yield each (micro-batch, weight) in `step`. Before each, seed the global generators of torch, Python and numpy
    from seed, step and slot, so that dropout is the same on any rank."""
    for slot, (batch, weight) in zip(step.slots, step, strict=True):
        seed_step(seed, step.number, -2 - slot.index)  # ranks count from 0, and -1 is used for building
        yield batch, weight
