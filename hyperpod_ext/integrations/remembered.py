"""State of a trainer, of its subclasses and of its callbacks, as a value in a snapshot.

The attributes of trainers and callbacks may change their structure at each step, so this module serializes them to
bytes. This module does not use pickle.
"""

from __future__ import annotations

import copy
import dis
import inspect
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.snapshot.tree import put_together, take_apart
from hyperpod_ext.runtime.state.training_state import raw_bytes
from hyperpod_ext.runtime.state.unsaved.reachable import is_of_script

_DATA = 1 << 20
"""Attributes above this limit (in bytes) are probably data, and are checked for changes only in the first steps."""
_COMPARED = 2
"""Number of steps at the start in which large attributes are checked for changes."""
_OF_REPORTS = frozenset({"log", "logs", "logger", "metric", "metrics", "stats", "time", "times", "timer", "seconds"})
"""An attribute whose name contains one of these words only describes training, and is not part of the state."""


class Remembered:
    """A state object whose value is the result of `read` at the last call of `freeze`. `write` restores the value.

    A step is committed when the next step begins, so changes after `freeze` belong to the next step.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self._read, self._write = read, write
        self._frozen = b""

    def freeze(self) -> None:
        """Read the value to save with the next committed step."""
        self._frozen = written(self._read())

    def state_dict(self) -> dict[str, Any]:
        return {"bytes": self._frozen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._frozen = state["bytes"]
        if self._frozen:
            self._write(read(self._frozen))


class OwnAttributes:
    """Attributes of a trainer or callback that have changed since the start, and that only the user's subclass sets.

    Attributes that methods of the library's class assign are not included. Attributes whose names contain a word for
    logs, metrics or times are not included.

    Args:
        owner: the trainer or callback.
        base: the library's class, from which the class of `owner` is derived.
    """

    def __init__(self, owner: Any, base: type) -> None:
        self._owner, self._kind = owner, type(owner).__name__
        self._of_base = assigned_by(base)
        self._first = {name: _seen(value) for name, value in self._own().items()}
        self._reads = 0

    def read(self) -> dict[str, Any]:
        """Return the attributes that have changed since this object was made.

        Raises:
            JobFailedError: a changing attribute is too large to be written to a snapshot at each step.
        """
        self._reads += 1
        changed: dict[str, Any] = {}
        lost: list[str] = []
        for name, value in self._own().items():
            first = self._first.get(name)
            is_large = isinstance(first, bytes) and len(first) > _DATA
            if (is_large and self._reads > 1 + _COMPARED) or (now := _seen(value)) == first:
                continue
            if is_large:
                raise JobFailedError(
                    f"{self._kind}.{name} ({type(value).__name__}) holds more than {_DATA >> 20} MiB, changes while "
                    "training, and would be lost at a fault",
                    hint="Keep its tensors in a torch.nn.Module that is an attribute of a callback: snapshots contain "
                    "such modules.",
                )
            if isinstance(now, bytes):
                changed[name] = value
            else:
                lost.append(f"{name} ({type(value).__name__})")
        if lost and self._reads == 1 + _COMPARED:
            sys.stderr.write(
                f"hyperpod_ext: {', '.join(lost)} of {self._kind} changed and cannot be in a snapshot: after a fault, "
                "its value is that of the start. Snapshots hold numbers, text, tensors, and lists and dicts of them.\n"
            )
        return changed

    def write(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._owner, name, like(getattr(self._owner, name, None), value))

    def _own(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self._owner).items()
            if name not in self._of_base and _OF_REPORTS.isdisjoint(name.lower().split("_"))
        }


class OwnCallbacks:
    """Changed attributes of callbacks whose classes the script defines. Callbacks of libraries save their own state.

    Args:
        callbacks: all callbacks of a trainer.
        base: the library's base class of callbacks.
    """

    def __init__(self, callbacks: Iterable[Any], base: type) -> None:
        own = [each for each in callbacks if is_of_script(type(each).__module__)]
        self._attributes = [OwnAttributes(each, base) for each in own]

    def read(self) -> list[dict[str, Any]]:
        return [each.read() for each in self._attributes]

    def write(self, values: Sequence[Mapping[str, Any]]) -> None:
        for each, value in zip(self._attributes, values, strict=True):
            each.write(value)


def modules_of(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return the modules in attributes of callbacks, such as averages of the weights, by `<class>.<attribute>`."""
    found: dict[str, Any] = {}
    for one in callbacks:
        for name, value in getattr(one, "__dict__", {}).items():
            if isinstance(value, torch.nn.Module):
                kind, count = type(one).__name__, 0
                while f"{kind}{count or ''}.{name}" in found:
                    count += 1
                found[f"{kind}{count or ''}.{name}"] = value
    return found


def assigned_by(kind: type) -> frozenset[str]:
    """Return the names of all attributes that methods of `kind` and of its base classes assign, on any object."""
    functions = [inspect.unwrap(each) for one in kind.__mro__ for each in vars(one).values() if callable(each)]
    return frozenset(
        str(step.argval)
        for each in functions
        if isinstance(each, FunctionType)
        for step in dis.get_instructions(each)
        if step.opname == "STORE_ATTR"
    )


def like(example: Any, value: Any) -> Any:
    """Return `value` with its dicts and lists converted to the container types in `example`, such as deque."""
    if isinstance(example, dict) and isinstance(value, Mapping):
        made = copy.copy(example)
        made.clear()
        made.update({key: like(example.get(key), each) for key, each in value.items()})
        return made
    if isinstance(example, deque):
        return deque(value, example.maxlen)
    return dict(value) if isinstance(value, Mapping) else value


def written(value: Any) -> bytes:
    """Return `value`, serialized to bytes.

    Raises:
        JobFailedError: `value` contains an object that is neither a tensor nor a value of JSON.
    """
    parts = take_apart(_plain(value), torch.Tensor)
    tensors = [
        [str(each.dtype).removeprefix("torch."), list(each.shape), str(each.device), bytes(raw_bytes(each)).hex()]
        for each in parts.tensors
    ]
    return json.dumps([parts.shape, parts.values, tensors]).encode()


def read(data: bytes) -> Any:
    """Return the value that `written` has serialized to `data`, with tensors on their original devices."""
    shape, values, tensors = json.loads(data)
    return put_together(shape, [_tensor(*each) for each in tensors], values)


def _tensor(dtype: str, shape: list[int], device: str, data: str) -> torch.Tensor:
    flat = torch.frombuffer(bytearray.fromhex(data) or bytearray(1), dtype=torch.uint8)[: len(data) // 2]
    return flat.view(getattr(torch, dtype)).reshape(shape).to(device)


def _plain(value: Any) -> Any:
    """Return `value` with deques replaced by lists, which `like` converts back to deques."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, deque | list):
        return [_plain(each) for each in value]
    return tuple(map(_plain, value)) if type(value) is tuple else value


def _seen(value: Any) -> bytes | int:
    """Return a key to compare `value` with later values: its serialized bytes, or its `id()` if serializing fails."""
    try:
        return written(value)
    except (JobFailedError, RuntimeError, ValueError, TypeError):  # value not serializable, e.g. a meta tensor
        return id(value)
