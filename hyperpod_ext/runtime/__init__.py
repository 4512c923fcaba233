"""The part of hyperpod_ext that runs in the training container.

Training scripts import two names from this package:

    from hyperpod_ext.runtime import Run, resilient

This package imports a module only when one of its names is first used, so that the agent and the memory server, which
use neither name, never import torch.
"""

from typing import TYPE_CHECKING

from hyperpod_ext.lazy import loader

if TYPE_CHECKING:
    from hyperpod_ext.runtime.dcp.reader import TieredStorageReader as TieredStorageReader
    from hyperpod_ext.runtime.dcp.tiers import Tiers as Tiers
    from hyperpod_ext.runtime.dcp.writer import TieredStorageWriter as TieredStorageWriter
    from hyperpod_ext.runtime.memory_server.managed_tier.tier import ManagedTier as ManagedTier
    from hyperpod_ext.runtime.training.loop import resilient as resilient
    from hyperpod_ext.runtime.training.run import Run as Run

_MODULES = {
    "ManagedTier": ".memory_server.managed_tier.tier",
    "Run": ".training.run",
    "TieredStorageReader": ".dcp",
    "TieredStorageWriter": ".dcp",
    "Tiers": ".dcp",
    "resilient": ".training.loop",
}

__all__ = sorted(_MODULES)

__getattr__ = loader(__name__, _MODULES)
