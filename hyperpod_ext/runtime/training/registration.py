"""Registration of the objects that a script passes all at once, for example as `**locals()`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.reproducible import Reproducible
from hyperpod_ext.runtime.state.training_state import Stateful


def stateful(objects: Mapping[str, Any]) -> dict[str, Stateful]:
    """Return the objects that have a state, each object once.

    A wrapped module is returned without its wrapper, and a submodule of another module is left out. An object with
    several names is returned under its shortest name; names of a wrapper are used only if there is no other name.
    """
    names: dict[int, list[tuple[bool, int, str]]] = {}
    values: dict[int, Stateful] = {}
    for name, value in objects.items():
        if _has_state(type(value)):
            inner = unwrapped(value)
            values[id(inner)] = inner
            names.setdefault(id(inner), []).append((inner is not value, len(name), name))
    parts = _parts(values.values())
    return {min(names[key])[2]: value for key, value in values.items() if key not in parts}


def unwrapped(value: Any) -> Any:
    """Return the module inside a wrapper of data parallelism or `torch.compile`; return any other object unchanged."""
    while True:
        if isinstance(value, DistributedDataParallel | Reproducible):
            value = value.module
        elif type(value).__name__ == "OptimizedModule":
            (value,) = value.children()  # the module inside torch.compile's wrapper
        else:
            return value


def check_registered(objects: Mapping[str, Any], registered: Mapping[str, Any]) -> None:
    """Check that all `objects` with a state are registered.

    Raises:
        JobFailedError: one of `objects` has a state, and is not registered.
    """
    inner = [unwrapped(value) for value in registered.values()]
    known = {id(value) for value in inner} | _parts(inner)
    if others := sorted(name for name, value in stateful(objects).items() if id(value) not in known):
        one = objects[others[0]]
        raise JobFailedError(
            f"steps({others[0]}=...): this {type(one).__name__} has a state that is not registered. run.restore, or "
            f"the first run.steps of this call, has registered these objects: {', '.join(sorted(registered))}",
            hint=f"Create {others[0]} before the first run.steps, or also pass {others[0]} to run.restore.",
        )


def _parts(values: Iterable[Any]) -> set[int]:
    """Return the `id()` of each module that is a submodule of one of `values`."""
    modules = [value for value in values if isinstance(value, torch.nn.Module)]
    return {id(part) for module in modules for part in module.modules() if part is not module}


def _has_state(kind: type) -> bool:
    """Return whether objects of this class have the methods `state_dict` and `load_state_dict`.

    The methods are looked up on an object's type, so that a class passed as an object counts as having no state.
    """
    return all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict"))
