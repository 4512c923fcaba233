"""What changes from step to step and is in no snapshot: after a fault, a new process would have it as at its start.

Compared when a process begins its steps, after its first and after its second, and never again. An error is raised only
for kinds that are training state whatever they are used for; a warning is written for some that probably are. Objects
that merely hold data, losses or clocks are nobody's business.
"""

from __future__ import annotations

import ctypes
import random
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.state import generators
from hyperpod_ext.runtime.state.reachable import (
    Named,
    anything,
    is_of_script,
    mentioned,
    of_script,
    reachable,
    variables,
)
from hyperpod_ext.runtime.state.training_state import local_of

_WINDOW = 64 << 10
"""Bytes that are read of a tensor's beginning, middle and end."""
_HARMLESS = ("log", "meter", "metric", "timer", "profil", "stats", "writer", "progress", "cache", "monitor", "track")
"""In the name of a class: it tells of training, and training does not depend on it."""
_NAMED = 6

Values = dict[str, Hashable]
Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class _Candidate:
    """An object that may be state, as it is now."""

    name: str
    kind: str
    severity: Severity
    values: Values
    """By the name of each part; those of tensors are samples of their bytes."""
    alive: Callable[[], Any]
    twice: bool = False
    """Whether it must change in two steps in a row to count."""


class UnsavedState:
    """Compares what a training function can reach, over its first two steps in this process."""

    def __init__(
        self,
        warn: Callable[[str], object] = sys.stderr.write,
        recorded: Callable[[list[str]], object] = lambda names: None,
    ) -> None:
        self._warn, self._recorded = warn, recorded
        self._left_out: list[Any] = []
        self._moments: list[dict[int, _Candidate]] = []

    @property
    def is_done(self) -> bool:
        return len(self._moments) == 3

    def leave_out(self, objects: Iterable[Any]) -> None:
        """These need no snapshot, whatever they do."""
        self._left_out += objects

    @property
    def left_out(self) -> tuple[str, ...]:
        """Classes of what needs no snapshot."""
        return tuple(sorted({type(each).__name__ for each in self._left_out}))

    def begin(self) -> None:
        """The steps begin, again or for the first time."""
        if not self.is_done:
            self._moments = []

    def see(
        self, frame: FrameType | None, kept: Sequence[Any], saved: Mapping[str, Any], tensors: Sequence[torch.Tensor]
    ) -> None:
        """The steps begin, or one has been committed.

        Args:
            frame: whoever runs the loop.
            kept: what `run.keep` returned.
            saved: what was handed to `run.restore`.
            tensors: of their states.

        Raises:
            JobFailedError: something changes from step to step and is in no snapshot.
        """
        if self.is_done or not (around := variables(frame)):
            return
        roots = [*around, *((f"run.keep()[{index}]", value) for index, value in enumerate(kept))]
        with torch.no_grad():
            self._moments.append(_candidates(roots, saved, tensors, self._left_out))
            if not self.is_done:
                return
            changed = _changed(self._moments, tensors)
        self._moments = [{}, {}, {}]
        if warnings := [each for each, _ in changed if each.severity == "warning"]:
            named = [f"{each.name} ({each.kind})" for each in warnings]
            self._recorded(named)
            names = _listed(named)
            self._warn(
                f"hyperpod_ext: {names} changed in the first two steps and is in no snapshot. If training depends on "
                "it, hand it to run.restore; if not, name it in run.leave_out.\n"
            )
        if errors := [(each, part) for each, part in changed if each.severity == "error"]:
            names = _listed([f"{each.name} ({each.kind}{f', {part}' if part else ''})" for each, part in errors])
            first = errors[0][0].name.split("[")[0].split(".")[-1] or "state"
            raise JobFailedError(
                f"{names} changes from step to step and is in no snapshot: after a fault it would be as at the start",
                hint=f"Hand it to run.restore({first}=...), as an object with state_dict() and load_state_dict(); if "
                "the script brings it to the step that run.restore returns by itself, call run.leave_out(...) with it.",
            )


def _candidates(
    roots: Sequence[Named], saved: Mapping[str, Any], tensors: Sequence[torch.Tensor], left_out: Sequence[Any]
) -> dict[int, _Candidate]:
    memory = {address for tensor in tensors if (address := _address(tensor))}
    handed = [*saved.items(), *(("", each) for each in left_out)]
    mentions = [each for _, value in saved.items() for each in _mentions(value)]
    known = {
        id(value) for _, value in reachable([*handed, *mentions], anything, most=100_000)
    } | generators.seeded_each_step()
    found = [(name, value) for name, value in reachable(roots, of_script) if id(value) not in known]
    known |= {id(each) for _, value in found for each in _of_loaders(value)}
    inside: set[int] = set()
    """Parts of a module that is named as a whole."""
    candidates: dict[int, _Candidate] = {}
    for name, value in found:
        if id(value) in known or id(value) in inside:
            continue
        if isinstance(value, torch.nn.Module):
            inside |= {id(each) for each in value.modules()}
        candidate = _candidate(name, value, memory)
        if candidate is not None and candidate.values:
            candidates[id(value)] = candidate
    return candidates


def _mentions(value: Any) -> list[Named]:
    """What the `state_dict` of a class of the script refers to beside its own attributes."""
    method = getattr(type(value), "state_dict", None)
    return mentioned(method) if isinstance(method, FunctionType) and is_of_script(method.__module__) else []


def _of_loaders(value: Any) -> list[Any]:
    """Generators that a loader or sampler draws its order from: they move with the data, not with the steps."""
    held = vars(value) if type(value).__module__.startswith("torch.utils.data") and hasattr(value, "__dict__") else {}
    samplers = [getattr(each, "generator", None) for each in held.values()]
    return [each for each in (held.get("generator"), *samplers) if each is not None]


def _candidate(name: str, value: Any, memory: set[int]) -> _Candidate | None:
    """`value` if it is of a kind that counts, with what of it is in no snapshot."""
    kind = type(value).__name__

    def of(severity: Severity, values: Values, *, twice: bool = False) -> _Candidate:
        return _Candidate(name, kind, severity, values, _reference(value), twice)

    def sampled(tensors: Iterable[tuple[str, Any]]) -> Values:
        return {
            name: _sample(each)
            for name, each in tensors
            if isinstance(each, torch.Tensor) and _address(each) and _address(each) not in memory
        }

    if isinstance(value, torch.nn.Module):
        return of("error", sampled(_persistent(value)))
    if isinstance(value, torch.optim.Optimizer):
        return of("error", sampled(_of_optimizer(value)))
    if isinstance(value, LRScheduler):
        return of("error", {"": getattr(value, "last_epoch", None)})
    if isinstance(value, torch.amp.GradScaler):
        return of("error", {"": repr(value.state_dict())})
    if (state := generators.state_of(value)) is not None:
        return of("error", {"": state}, twice=True)
    if isinstance(value, deque):
        return _of_growing(value, of)
    if type(value) in (list, dict):
        return _of_container(value, of, sampled)
    if any(part in kind.lower() for part in _HARMLESS) or not hasattr(value, "__dict__"):
        return None
    own = list(vars(value).items())
    if _is_stateful(type(value)) and not type(value).__module__.startswith(("torch.", "torchdata.")):
        inner = [(f"{key}.{name}", each) for key, held in own for name, each in _listed_tensors(held)]
        if values := sampled([*own, *inner]):
            return of("error", values, twice=True)
    if is_of_script(type(value).__module__):
        counters = {key: each for key, each in own if type(each) is int}
        return of("warning", {**counters, **_arrays(own), **sampled(own)}, twice=True)
    return None


def _of_container(
    value: Any, of: Callable[..., _Candidate], sampled: Callable[[Iterable[tuple[str, Any]]], Values]
) -> _Candidate | None:
    items = _listed_tensors(value)
    if 2 <= len(items) == len(value) and all(each.numel() > 1 or each.dim() == 0 for _, each in items):
        return of("warning", sampled(items), twice=True)
    return _of_growing(value, of) if type(value) is list else None


def _of_growing(value: list[Any] | deque[Any], of: Callable[..., _Candidate]) -> _Candidate | None:
    return of("warning", {"length": len(value)}, twice=True) if not value or _is_data(value[-1]) else None


def _listed_tensors(value: Any) -> list[tuple[str, torch.Tensor]]:
    items = value.items() if type(value) is dict else enumerate(value) if type(value) is list else ()
    return [(str(key), each) for key, each in list(items) if isinstance(each, torch.Tensor)]


def _is_data(value: Any) -> bool:
    """Whether it is, or holds, more than a number: an entry of a replay buffer, not a loss."""
    if isinstance(value, tuple | list | dict):
        return any(_is_data(each) for each in (value.values() if isinstance(value, dict) else value))
    return (isinstance(value, torch.Tensor) and value.numel() > 1) or _is_array(value)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.size > 1 and value.dtype != object


def _arrays(own: Iterable[tuple[str, Any]]) -> Values:
    return {key: zlib.crc32(each.ravel()[: _WINDOW // 8].tobytes()) for key, each in own if _is_array(each)}


def _is_stateful(kind: type) -> bool:
    return all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict"))


def _persistent(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Tensors that its state would have, without calling what the script may have hooked to `state_dict`."""
    passing = {
        f"{prefix}{'.' if prefix else ''}{name}"
        for prefix, each in module.named_modules()
        for name in each._non_persistent_buffers_set
    }
    return [*module.named_parameters(), *((n, each) for n, each in module.named_buffers() if n not in passing)]


def _of_optimizer(optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    states = list(optimizer.state.values())
    return [
        (f"{key} of parameter {index}", each)
        for index, state in enumerate(states)
        if isinstance(state, dict)
        for key, each in state.items()
    ]


def _address(tensor: torch.Tensor) -> int:
    """Of the storage that holds a tensor's values; 0: it has none now, as FSDP2's between two uses."""
    local = local_of(tensor)
    if type(local) is not torch.Tensor:
        return 0
    if local.layout != torch.strided or local.is_meta:
        return 0
    storage = local.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else 0


def _sample(tensor: torch.Tensor) -> Hashable:
    """Something that differs when the values do. Of a device nothing is read: it would wait for what is queued."""
    local = local_of(tensor)
    if local.device.type != "cpu" or not local.is_contiguous():
        return -1 if tensor.is_inference() else tensor._version
    nbytes, first = local.numel() * local.element_size(), local.data_ptr()
    starts = sorted({0, max(0, nbytes // 2 - _WINDOW // 2), max(0, nbytes - _WINDOW)})
    checksum = 0
    for start in starts:
        checksum = zlib.crc32(ctypes.string_at(first + start, min(_WINDOW, nbytes - start)), checksum)
    return (tuple(local.shape), checksum)


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _changed(
    moments: Sequence[Mapping[int, _Candidate]], tensors: Sequence[torch.Tensor]
) -> list[tuple[_Candidate, str]]:
    """Of what is the same object at the end as before: what has changed, and a part of it that has."""
    start, before, now = moments
    copies: set[Hashable] | None = None
    found = []
    for key, candidate in now.items():
        parts = _differing(before.get(key), candidate)
        if candidate.twice:
            parts = [part for part in parts if part in _differing(start.get(key), before.get(key))]
        if not parts:
            continue
        if isinstance(candidate.alive(), torch.nn.Module):  # what is copied from saved state each step, is again
            if copies is None:
                copies = {_sample(tensor) for tensor in tensors if _address(tensor)}
            parts = [part for part in parts if candidate.values[part] not in copies]
        if candidate.kind in generators.KINDS or isinstance(candidate.alive(), random.Random):
            parts = parts if generators.goes_on(before[key].values[""], candidate.values[""]) else []
        if parts:
            found.append((candidate, parts[0]))
    return found


def _differing(before: _Candidate | None, now: _Candidate | None) -> list[str]:
    if before is None or now is None or before.alive() is None or before.alive() is not now.alive():
        return []
    return [part for part, value in now.values.items() if part in before.values and before.values[part] != value]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
