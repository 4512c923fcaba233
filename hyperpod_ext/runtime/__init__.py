"""What runs inside the training container. Training scripts need two names from here:

    from hyperpod_ext.runtime import Run, resilient

They are loaded on first use, so that the node's own processes never import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyperpod_ext.runtime.training.loop import resilient as resilient
    from hyperpod_ext.runtime.training.run import Run as Run

__all__ = ["Run", "resilient"]

_MODULES = {"Run": "hyperpod_ext.runtime.training.run", "resilient": "hyperpod_ext.runtime.training.loop"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
