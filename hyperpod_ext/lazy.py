"""Loads the names of a package on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def loader(package: str, modules: Mapping[str, str], check: Callable[[], None] = lambda: None) -> Callable[[str], Any]:
    """Make a `__getattr__` for `package` that imports names on first use.

    Args:
        modules: module that defines each name.
        check: called before an import; raises if this environment lacks what the modules need.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        check()
        return getattr(import_module(modules[name], package), name)

    return load
