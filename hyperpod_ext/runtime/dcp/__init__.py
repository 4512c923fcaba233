"""Checkpoints through torch.distributed.checkpoint (DCP), for scripts under plain torchrun.

Scripts import the classes of this package as follows:

    from hyperpod_ext.runtime import TieredStorageReader, TieredStorageWriter, Tiers

This package imports a class only when it is first used, so that the memory server never imports torch.
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
