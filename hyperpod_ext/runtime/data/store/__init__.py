"""Tokens and samples as memory-mapped files: one copy a node, which every rank reads and no process owns.

    from hyperpod_ext.runtime.data.store import Packed, TokenStore, build

A store is built once (`build`, `follow`, or `hp-ext data build`), read by id, and stays when processes and pods die.
Names are loaded on first use; reading needs numpy, and only `TensorSource` needs torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyperpod_ext.runtime.data.convert.background import Conversion as Conversion
    from hyperpod_ext.runtime.data.convert.background import follow as follow
    from hyperpod_ext.runtime.data.convert.convert import build as build
    from hyperpod_ext.runtime.data.token_store.arrow import ArrowStore as ArrowStore
    from hyperpod_ext.runtime.data.token_store.eviction import evict as evict
    from hyperpod_ext.runtime.data.token_store.megatron import MegatronStore as MegatronStore
    from hyperpod_ext.runtime.data.token_store.packed import Packed as Packed
    from hyperpod_ext.runtime.data.token_store.reader import TokenStore as TokenStore
    from hyperpod_ext.runtime.data.token_store.ring import ReadyRing as ReadyRing
    from hyperpod_ext.runtime.data.token_store.tensors import TensorSource as TensorSource

_MODULES = {
    "ArrowStore": "..token_store.arrow",
    "Conversion": "..convert.background",
    "MegatronStore": "..token_store.megatron",
    "Packed": "..token_store.packed",
    "ReadyRing": "..token_store.ring",
    "TensorSource": "..token_store.tensors",
    "TokenStore": "..token_store.reader",
    "build": "..convert.convert",
    "evict": "..token_store.eviction",
    "follow": "..convert.background",
}

__all__ = [
    "ArrowStore",
    "Conversion",
    "MegatronStore",
    "Packed",
    "ReadyRing",
    "TensorSource",
    "TokenStore",
    "build",
    "evict",
    "follow",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
