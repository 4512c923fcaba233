"""Replace functions of modules by other functions while a script runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(places: list[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Replace functions of modules inside the context, and restore the original functions at its end.

    Args:
        places: module, function name and new function, for each function to replace.
    """
    former = [(module, name, getattr(module, name)) for module, name, _ in places]
    try:
        for module, name, function in places:
            setattr(module, name, function)
        yield
    finally:
        for module, name, function in former:
            setattr(module, name, function)
