"""Checkpoints through torch.distributed.checkpoint, for scripts under plain torchrun:

    from hyperpod_ext.runtime import TieredStorageReader, TieredStorageWriter, Tiers

These classes are imported at their first use, so that the memory server never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyperpod_ext.lazy import loader
from hyperpod_ext.runtime.torch_requirements.private_names import Feature, check

if TYPE_CHECKING:
    from hyperpod_ext.runtime.dcp.reader import TieredStorageReader as TieredStorageReader
    from hyperpod_ext.runtime.dcp.tiers import Tiers as Tiers
    from hyperpod_ext.runtime.dcp.writer import TieredStorageWriter as TieredStorageWriter

__all__ = ["TieredStorageReader", "TieredStorageWriter", "Tiers"]

_MODULES = {"TieredStorageReader": ".reader", "TieredStorageWriter": ".writer", "Tiers": ".tiers"}

__getattr__ = loader(__name__, _MODULES, lambda: check(Feature.DCP))
