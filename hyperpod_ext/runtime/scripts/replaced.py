"""Replace functions of modules while a script runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(places: list[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Set functions of modules, given by module, name and new function; at the end, set the former ones again."""
    former = [(module, name, getattr(module, name)) for module, name, _ in places]
    try:
        for module, name, function in places:
            setattr(module, name, function)
        yield
    finally:
        for module, name, function in former:
            setattr(module, name, function)
