"""Imports the public names of a package on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def loader(package: str, modules: Mapping[str, str], check: Callable[[], None] = lambda: None) -> Callable[[str], Any]:
    """Return a `__getattr__` function for `package` that imports the package's public names on first use.

    Args:
        modules: for each public name, the module that defines it, relative to `package`.
        check: function that is called before each import, and raises an error if a dependency of the modules is
            missing.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        check()
        return getattr(import_module(modules[name], package), name)

    return load
