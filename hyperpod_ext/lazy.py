"""Names that a package offers and that are loaded on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def loader(package: str, modules: Mapping[str, str], check: Callable[[], None] = lambda: None) -> Callable[[str], Any]:
    """Return the `__getattr__` of `package`.

    Args:
        modules: the module that defines each name.
        check: called before a module is loaded; raises if it cannot work here.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        check()
        return getattr(import_module(modules[name], package), name)

    return load
