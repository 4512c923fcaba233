"""Find training state hidden in torch's objects: DDP's communication hooks, and seeds of data loaders.

A DataLoader without a generator of its own draws a seed from torch's global generator each time it is iterated.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hyperpod_ext.runtime.state.unsaved import generators
from hyperpod_ext.runtime.state.unsaved.fingerprints import is_number, of_plain
from hyperpod_ext.runtime.state.unsaved.reachable import Named, anything, enclosed, is_ours, reachable


class HookState(NamedTuple):
    """State that a communication hook of DDP keeps from step to step."""

    name: str
    owner: Any
    """The object with which the hook was registered; the hook itself if it was registered with None."""
    mark: Hashable
    """Fingerprint of the state."""


def hook_states(objects: Iterable[Any], known: set[int], memory: set[int]) -> Iterator[HookState]:
    """Yield the state of DDP's communication hooks, such as PowerSGD's error feedback.

    The state consists of the object with which the hook was registered, and of the hook's closure variables.

    Args:
        objects: objects of the script. Objects that are not DDP are skipped.
        known: ids of objects that are saved or left out.
        memory: storage addresses of tensors in snapshots.
    """
    for wrapped in objects:
        for hook, state in wrapped._comm_hooks if isinstance(wrapped, DistributedDataParallel) else ():
            around = enclosed(hook) if isinstance(hook, FunctionType) else []
            roots = [(name, each) for name, each in [("", state), *around] if id(each) not in known]
            owner = hook if state is None else state
            yield HookState(f"{getattr(hook, '__name__', 'hook')}.state", owner, _mark(roots, memory))


def unseeded_loaders(roots: Sequence[Named], saved: Iterable[Any]) -> list[str]:
    """Return the names and types of the DataLoaders in `roots` that have no generator of their own.

    The result is empty if the script has registered its training data with `run.restore`. Other loaders, for example
    for validation, are assumed to be read from their beginning each time.

    Args:
        roots: named objects of the script.
        saved: the objects passed to `run.restore`.
    """
    if (module := sys.modules.get("torch.utils.data")) is None:
        return []
    handed = {id(each): each for each in saved}
    if any(isinstance(getattr(each, "loader", None), module.DataLoader) for each in handed.values()):
        return []
    return [
        f"{name} ({type(each).__name__})"
        for name, each in roots
        if issubclass(type(each), module.DataLoader) and each.generator is None and id(each) not in handed
    ]


def _mark(roots: Sequence[Named], memory: set[int]) -> Hashable:
    """Return a fingerprint of the numbers, tensors, arrays and generators in `roots`."""

    def held(name: str, value: Any) -> Iterable[Named]:
        return () if isinstance(value, dist.ProcessGroup) or is_ours(type(value).__module__) else anything(name, value)

    found: list[Hashable] = [(name, value) for name, value in roots if is_number(value)]
    for name, value in reachable(roots, held):
        mark = generators.state_of(value)
        found.append(of_plain(value, memory) if mark is None and not isinstance(value, list | dict) else mark)
        found += [(key, each) for key, each in held(name, value) if is_number(each)]
    return tuple(found)
