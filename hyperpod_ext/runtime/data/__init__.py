"""Samples that an elastic job reads: each once an epoch, in one order, whatever its history of world sizes.

    from hyperpod_ext.runtime.data import ElasticDataLoader

Names are loaded on first use, so that importing this costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyperpod_ext.config.elastic import batch_at as batch_at
    from hyperpod_ext.config.scales import plan_scales as plan_scales
    from hyperpod_ext.runtime.data.loader import ElasticDataLoader as ElasticDataLoader
    from hyperpod_ext.runtime.data.loader import Step as Step
    from hyperpod_ext.runtime.data.mixing import Mixture as Mixture
    from hyperpod_ext.runtime.data.positions import Slot as Slot
    from hyperpod_ext.runtime.data.sampler import ElasticBatchSampler as ElasticBatchSampler
    from hyperpod_ext.runtime.data.schedule import learning_rate as learning_rate
    from hyperpod_ext.runtime.data.shuffle import BlockShuffle as BlockShuffle
    from hyperpod_ext.runtime.data.sources import Shards as Shards
    from hyperpod_ext.runtime.data.sources import Stream as Stream

_MODULES = {
    "BlockShuffle": f"{__name__}.shuffle",
    "ElasticBatchSampler": f"{__name__}.sampler",
    "ElasticDataLoader": f"{__name__}.loader",
    "Mixture": f"{__name__}.mixing",
    "Shards": f"{__name__}.sources",
    "Slot": f"{__name__}.positions",
    "Step": f"{__name__}.loader",
    "Stream": f"{__name__}.sources",
    "batch_at": "hyperpod_ext.config.elastic",
    "learning_rate": f"{__name__}.schedule",
    "plan_scales": "hyperpod_ext.config.scales",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
