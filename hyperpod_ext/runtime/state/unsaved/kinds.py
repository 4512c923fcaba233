"""Find objects that may be training state, by their type, and read their values that are in no snapshot."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

from hyperpod_ext.runtime.state.unsaved import generators
from hyperpod_ext.runtime.state.unsaved.carried import carried, globals_set, iterated, set_outside
from hyperpod_ext.runtime.state.unsaved.fingerprints import (
    address_of,
    is_array,
    is_number,
    of_array,
    of_iterator,
    of_plain,
    of_tensor,
)
from hyperpod_ext.runtime.state.unsaved.library_objects import hook_states
from hyperpod_ext.runtime.state.unsaved.reachable import (
    MAPPINGS,
    Named,
    anything,
    class_values,
    is_of_script,
    is_own,
    mentioned,
    of_script,
    own_values,
    reachable,
    script_frames,
)

_HARMLESS = ("log", "meter", "metric", "timer", "profil", "stats", "writer", "progress", "cache", "monitor", "track")
"""A class or variable with one of these words in its name only describes training, and does not affect it."""

Values = dict[str, Hashable]
Severity = Literal["error", "warning", "note"]
"""What happens if an object changes without being saved. "error": the job ends. "warning": a warning is logged. "note":
the object is only recorded in the event log, because its change matters only after a fault."""


@dataclass(frozen=True)
class Candidate:
    """An object that may be training state, with its present values."""

    name: str
    kind: str
    severity: Severity
    values: Values
    """Numbers, and fingerprints of other values such as tensors, by the name of the part of the object."""
    alive: Callable[[], Any]
    """Function that returns the object; None if the object no longer exists."""
    twice: bool = False
    """Whether the object is reported only if it changes in two steps in a row."""
    items: Mapping[str, int] | None = None
    """The id of each item, by the item's name in `values`; None unless the object is a dict or list."""
    version: int | None = None
    """Autograd's version counter, for a candidate that is a tensor in an attribute of a module. -1: the attribute is
    an array or a tuple, which have no counter. None: the candidate is no attribute of a module, or is a number."""
    doubtful: bool = False
    """Whether the values are possibly only results of the newest step, which no later step reads."""

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})" if self.kind not in self.name else self.name


def candidates(
    frame: FrameType | None,
    roots: Sequence[Named],
    neighbours: Sequence[Any],
    saved: Mapping[str, Any],
    tensors: Sequence[torch.Tensor],
    left_out: Sequence[Any],
) -> dict[Hashable, Candidate]:
    """Return the candidates reachable from `roots`, by a key that identifies the same object at a later call.

    Args:
        frame: the frame of the function with the training loop.
        roots: named objects from which the search starts.
        neighbours: iterators that the loop iterates together with `run.steps`.
        saved: the objects passed to `run.restore`, by name.
        tensors: all tensors in the states of the saved objects.
        left_out: objects, or names of candidates, that the script has passed to `run.leave_out`.
    """
    memory = {address for tensor in tensors if (address := address_of(tensor))}
    handed = [*saved.items(), *(("", each) for each in left_out)]
    mentions = [each for _, value in saved.items() for each in _mentions(value)]
    known = {
        id(value) for _, value in reachable([*handed, *mentions], anything, most=100_000)
    } | generators.seeded_each_step()
    everything = list(reachable(roots, of_script))
    reached = [(name, value) for name, value in everything if id(value) not in known]
    found: dict[Hashable, Candidate] = _of_objects(reached, known, memory)
    found |= _of_variables(frame, reached, memory)
    found |= _of_classes(everything, memory) | _of_modules(everything, memory, {id(each) for each in left_out})
    for hook in hook_states((value for _, value in reached), known, memory):
        kind = type(hook.owner).__name__
        found[id(hook.owner)] = Candidate(hook.name, kind, "error", {"": hook.mark}, _reference(hook.owner))
    for value in neighbours:
        if id(value) not in found and (values := _places(value, known, memory)):
            kind = type(value).__name__
            found[id(value)] = Candidate(
                f"{kind} iterated with run.steps", kind, "warning", values, _reference(value), True
            )
    names = {each for each in left_out if isinstance(each, str)}
    return {key: each for key, each in found.items() if each.name not in names}


def _of_objects(reached: Sequence[Named], known: set[int], memory: set[int]) -> dict[Hashable, Candidate]:
    known = known | {id(each) for _, value in reached for each in _of_loaders(value)}
    inside: set[int] = set()
    """Ids of the visited modules and of their submodules."""
    found: dict[Hashable, Candidate] = {}
    for name, value in reached:
        if id(value) in known or id(value) in inside:
            continue
        if isinstance(value, torch.nn.Module):
            inside |= {id(each) for each in value.modules()}
        candidate = _candidate(name, value, memory, known)
        if candidate is not None:
            found[id(value)] = candidate
    return found


def _of_variables(frame: FrameType | None, reached: Sequence[Named], memory: set[int]) -> dict[Hashable, Candidate]:
    """Return candidates for variables that keep their values from step to step.

    Candidates are local variables that the loop carries, `nonlocal` variables, and globals that functions set.
    """
    frames, functions = list(script_frames(frame)), _functions(reached)
    owned: list[tuple[Any, str, str, Any]] = []
    owned += [(each.f_code, name, name, value) for each in frames for name, value in carried(each)]
    owned += [(each.__code__, name, name, value) for each in functions for name, value in set_outside(each)]
    found = {(id(owner), key): (owner, name, value) for owner, key, name, value in owned}
    main = {id(each.f_globals) for each in frames}
    for code, known in [
        *((each.f_code, each.f_globals) for each in frames),
        *((f.__code__, f.__globals__) for f in functions),
    ]:
        for variables, key in globals_set(code, known):
            name = key if id(variables) in main else f"{variables['__name__'].rpartition('.')[2]}.{key}"
            found[id(variables), key] = (variables, name, variables[key])
    return {
        at: Candidate(name, type(value).__name__, "warning", {"": mark}, _reference(owner), twice=True)
        for at, (owner, name, value) in found.items()
        if (mark := of_plain(value, memory)) is not None
    }


def _of_classes(reached: Sequence[Named], memory: set[int]) -> dict[Hashable, Candidate]:
    """Return candidates for class attributes of the script's classes, which no object's `state_dict()` contains."""
    return {
        (id(kind), key): _attribute(f"{kind.__name__}.{key}", value, mark, _reference(kind))
        for _, kind in reached
        if isinstance(kind, type)
        for key, value in class_values(kind)
        if type(value) not in (list, dict) and (mark := of_plain(value, memory)) is not None
    }


def _of_modules(reached: Sequence[Named], memory: set[int], left_out: set[int]) -> dict[Hashable, Candidate]:
    """Return candidates for attributes of the script's modules. A module's state has only registered tensors."""
    return {
        (id(each), key): _attribute(
            f"{name}{'.' if path else ''}{path}.{key}", value, mark, _reference(each), version=_version(value)
        )
        for name, module in reversed(reached)  # the nearest path, which is last, gives the name
        if isinstance(module, torch.nn.Module) and id(module) not in left_out
        for path, each in module.named_modules()
        if is_own(each) and type(each).get_extra_state is torch.nn.Module.get_extra_state
        for key, value in list(vars(each).items())
        if type(value) not in (list, dict) and left_out.isdisjoint((id(each), id(value)))
        if (mark := _mark(value, memory)) is not None
    }


def _mark(value: Any, memory: set[int]) -> Hashable:
    """Return the fingerprint of an attribute; None if it cannot be read, like a nested tensor or one inside `vmap`."""
    try:
        return of_plain(value, memory)
    except (RuntimeError, NotImplementedError, RecursionError, TypeError, ValueError):
        return None  # any class in the attribute may raise any of these errors


def _version(value: Any) -> int | None:
    """Return the `Candidate.version` of an attribute; None for a number, which is never the result of a step."""
    if is_number(value):
        return None
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else -1


def _attribute(
    name: str, value: Any, mark: Hashable, alive: Callable[[], Any], version: int | None = None
) -> Candidate:
    severity: Severity = "note" if is_descriptive(name) else "warning"
    return Candidate(name, type(value).__name__, severity, {"": mark}, alive, twice=True, version=version)


def codes_of(frame: FrameType | None, reached: Sequence[Named]) -> list[CodeType]:
    """Return the code of the script's running functions, and of the script's functions among the `reached` objects."""
    return [each.f_code for each in script_frames(frame)] + [each.__code__ for each in _functions(reached)]


def _functions(reached: Sequence[Named]) -> list[FunctionType]:
    return [value for _, value in reached if isinstance(value, FunctionType) and is_of_script(value.__module__)]


def _places(iterator: Any, known: set[int], memory: set[int]) -> Values:
    """Return the fingerprint of an iterator's position, as the values of a candidate; empty if the iterator reads saved
    objects.

    Args:
        iterator: the iterator.
        known: ids of objects that are saved or left out.
        memory: storage addresses of tensors in snapshots.
    """
    held = [item for each in iterated(iterator) for item in gc.get_referents(each)]
    return {} if any(id(each) in known for each in held) else {"": of_iterator(iterator, memory)}


def _mentions(value: Any) -> list[Named]:
    """Return the globals and closure variables that `value.state_dict` uses, if the script has defined the method."""
    method = getattr(type(value), "state_dict", None)
    return mentioned(method) if isinstance(method, FunctionType) and is_of_script(method.__module__) else []


def _of_loaders(value: Any) -> list[Any]:
    """Return the random generators of a data loader or its sampler, which advance with the data, not with the steps."""
    held = vars(value) if type(value).__module__.startswith("torch.utils.data") and hasattr(value, "__dict__") else {}
    samplers = [getattr(each, "generator", None) for each in held.values()]
    return [each for each in (held.get("generator"), *samplers) if each is not None]


def _candidate(name: str, value: Any, memory: set[int], known: set[int]) -> Candidate | None:
    """Return a candidate for an object, with the object's values that are not saved; None if the type is ignored.

    Args:
        name: path to the object, such as `utils.STATE`.
        value: the object.
        memory: storage addresses of tensors in snapshots.
        known: ids of objects that are saved or left out.
    """
    kind = type(value).__name__

    def of(severity: Severity, values: Values, *, twice: bool = False, **more: Any) -> Candidate:
        return Candidate(name, kind, severity, values, _reference(value), twice, **more)

    def sampled(tensors: Iterable[tuple[str, Any]]) -> Values:
        return {
            name: of_tensor(each)
            for name, each in tensors
            if isinstance(each, torch.Tensor) and address_of(each) and address_of(each) not in memory
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
    if isinstance(value, deque | set):
        return _of_growing(value, of)
    if type(value) in (list, *MAPPINGS):
        return _of_container(value, of, sampled)
    if isinstance(value, Iterator):
        return of("warning", _places(value, known, memory), twice=True)
    own = own_values(value)
    numbers = {key: each for key, each in own if is_number(each)}
    if is_descriptive(kind):
        return of("note", numbers, twice=True) if is_own(value) else None
    if _is_stateful(type(value)) and not type(value).__module__.startswith(("torch.", "torchdata.")):
        inner = [(f"{key}.{name}", each) for key, held in own for name, each in _listed(held)]
        if values := sampled([*own, *inner]):
            return of("error", values, twice=True)
    if is_own(value):
        arrays = {key: of_array(each) for key, each in own if is_array(each)}
        return of("warning", {**numbers, **arrays, **sampled(own)}, twice=True)
    return None


def is_descriptive(name: str) -> bool:
    """Return whether a class or variable with this name only describes training, such as a list of metrics."""
    return any(part in name.lower() for part in _HARMLESS)


def _of_container(
    value: Any, of: Callable[..., Candidate], sampled: Callable[[Iterable[tuple[str, Any]]], Values]
) -> Candidate:
    items = _listed(value)
    tensors = [each for _, each in items if isinstance(each, torch.Tensor)]
    tensors_only = 2 <= len(tensors) == len(value) and any(each.numel() > 1 or each.dim() == 0 for each in tensors)
    if tensors_only or type(value) is not list:
        numbers = {key: each for key, each in items if is_number(each)}
        arrays = {key: of_array(each) for key, each in items if is_array(each)}
        if values := {**sampled(items), **numbers, **arrays}:
            ids = {key: id(each) for key, each in items if key not in numbers}
            return of("warning", values, twice=True, items=ids, doubtful=not tensors_only)
    return _of_growing(value, of)


def _of_growing(value: Any, of: Callable[..., Candidate]) -> Candidate:
    items = value.values() if isinstance(value, dict) else value
    data = not value or (not isinstance(value, set) and _is_data(next(reversed(items))))
    doubtful = isinstance(value, dict)
    return of("warning" if data else "note", {"length": len(value)}, twice=True, doubtful=doubtful)


def _listed(value: Any) -> list[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if type(value) is list else ()
    return [(str(key), each) for key, each in list(items)]


def _is_data(value: Any) -> bool:
    """Return whether `value` is or contains an array or tensor with several elements.

    A list of arrays or tensors with several elements is probably a replay buffer, not a list of losses.
    """
    if isinstance(value, tuple | list | dict):
        return any(_is_data(each) for each in (value.values() if isinstance(value, dict) else value))
    return (isinstance(value, torch.Tensor) and value.numel() > 1) or is_array(value)


def _is_stateful(kind: type) -> bool:
    return all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict"))


def _persistent(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return a module's parameters and persistent buffers, without calling the script's hooks on `state_dict`."""
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


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
