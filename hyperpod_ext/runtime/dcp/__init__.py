"""Checkpoints through torch.distributed.checkpoint, for scripts under plain torchrun:

    from hyperpod_ext.runtime.dcp import TieredStorageReader, TieredStorageWriter, Tiers

They are loaded on first use, so that the memory server started by them never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hyperpod_ext.runtime.torch_requirements.private_names import Feature, check

if TYPE_CHECKING:
    from hyperpod_ext.runtime.dcp.reader import TieredStorageReader as TieredStorageReader
    from hyperpod_ext.runtime.dcp.tiers import Tiers as Tiers
    from hyperpod_ext.runtime.dcp.writer import TieredStorageWriter as TieredStorageWriter

__all__ = ["TieredStorageReader", "TieredStorageWriter", "Tiers"]

_MODULES = {
    "TieredStorageReader": "hyperpod_ext.runtime.dcp.reader",
    "TieredStorageWriter": "hyperpod_ext.runtime.dcp.writer",
    "Tiers": "hyperpod_ext.runtime.dcp.tiers",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check(Feature.DCP)
    return getattr(import_module(_MODULES[name]), name)
