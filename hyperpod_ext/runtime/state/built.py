"""Record how a script builds its models and optimizers, and restore later changes by training in a new process.

A new process builds the same objects as the process it replaces. Training may have changed the type, shape or strides
of a module's tensor, `requires_grad` of a parameter, `training` of a module, or the parameter groups of an optimizer.
Snapshots store the changes that training has made to the objects. A new process that has built the same objects applies
the stored changes to them. If a new process has built different objects, these objects stay as built, or the restore
fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.snapshot.image import empty, form_of, is_dtensor, part_name
from hyperpod_ext.runtime.snapshot.layout_plan import Item
from hyperpod_ext.runtime.snapshot.tree import Parts, fqn, leaf_paths
from hyperpod_ext.runtime.state import gradients

Groups = list[list[int]]
"""For each parameter group of an optimizer, the indices of its parameters in `gradients.parameters`."""

Keys = dict[str, tuple[tuple[str, int], ...]]
"""By module name: each key of the module's `state_dict()`, with the index of the first key that has the same tensor
(for tied tensors, the index of an earlier key)."""

Changes = Mapping[str, Any]
"""Changes of objects, as JSON. `optimizers` has the type name of each optimizer. `trained` (the parameters that need
gradients), `training` (the modules in training mode) and `groups` (parameter groups by optimizer) are pairs of the
original value and the present value. For an unchanged value, the pair is left out."""


class Built:
    """The original form of one process's objects: tensor types and shapes, flags, and optimizer groups.

    Args:
        objects: the objects passed to `restore`, by name.
        parts: the split state of these objects.
        keys: keys of each module's `state_dict()`.
    """

    def __init__(self, objects: Mapping[str, Any], parts: Parts, keys: Keys) -> None:
        self.forms = {name: form_of(tensor, name) for name, tensor in _of_modules(objects, parts)}
        """Original type, shape and strides of the modules' tensors, by tensor name."""
        self._keys = keys
        parameters = gradients.parameters(objects.values())
        self._parameters = len(parameters)
        self._flags, self._groups, _ = _now(objects, parameters)

    def changes(self, objects: Mapping[str, Any], keys: Keys, parameters: Sequence[torch.Tensor]) -> Changes:
        """Return the changes since the objects were built.

        Args:
            objects: the objects passed to `restore`, by name.
            keys: the present keys of each module's `state_dict()`.
            parameters: the parameters of all objects.

        Raises:
            JobFailedError: a new process could not repeat the change. Either a module has gained or lost parameters or
                buffers, or an optimizer has parameters that were in no registered object.
        """
        for name, module in objects.items():
            if name in keys and keys[name] != self._keys[name] and not _loads_by_itself(module):
                raise _other_keys(name, dict(self._keys[name]), dict(keys[name]))
        flags, groups, optimizers = _now(objects, parameters)
        changes: dict[str, Any] = {"optimizers": optimizers}
        changes |= {name: [self._flags[name], now] for name, now in flags.items() if now != self._flags[name]}
        if changed := {name: [self._groups[name], now] for name, now in groups.items() if now != self._groups[name]}:
            changes["groups"] = changed
        for name, (_, now) in changed.items():
            if any(number >= self._parameters for group in now for number in group):
                raise JobFailedError(
                    f"{name} has been given parameters that were in no module or optimizer passed to restore(), so a "
                    "new process could not restore the parameter group",
                    hint="Pass the module of these parameters to restore(), too.",
                )
        return changes

    def set_flags(self, objects: Mapping[str, Any], changes: Changes) -> None:
        """Set `requires_grad` of parameters and `training` of modules to the values in `changes`."""
        flagged: list[tuple[str, str, Sequence[Any]]] = [
            ("trained", "requires_grad", gradients.parameters(objects.values())),
            ("training", "training", _modules(objects)),
        ]
        for name, attribute, things in flagged:
            built, now = changes.get(name, (self._flags[name], self._flags[name]))
            chosen = {number for low, high in now for number in range(low, high)}
            for number, thing in enumerate(things if built == self._flags[name] else ()):
                if getattr(thing, attribute) != (number in chosen):
                    setattr(thing, attribute, number in chosen)

    def regroup(self, objects: Mapping[str, Any], changes: Changes) -> None:
        """Set the parameter groups of each optimizer to the groups in `changes`; options such as `lr` stay unchanged.

        Raises:
            JobFailedError: the state was saved with an optimizer of another type.
        """
        parameters = gradients.parameters(objects.values())
        _, groups, types = _now(objects, parameters)
        for name, kind in types.items():
            saved = changes.get("optimizers", {}).get(name, kind)
            if saved != kind:
                raise JobFailedError(
                    f"{name} is an optimizer of type {kind} here; the snapshot has the state of type {saved}",
                    hint=f"Restore with {saved}, or start a job with another name.",
                )
            built, now = changes.get("groups", {}).get(name, (self._groups[name], self._groups[name]))
            if built == self._groups[name] and now != groups[name]:
                _set_groups(objects[name], [[parameters[number] for number in numbers] for numbers in now])

    def reform(
        self, objects: Mapping[str, Any], parts: Parts, saved: Callable[[str], Item | None], *, cast: bool = False
    ) -> None:
        """Give the modules' tensors the saved types, shapes and strides, if training had changed them.

        Args:
            objects: the objects passed to `restore`, by name.
            parts: the split state of these objects.
            saved: returns the snapshot's item for a tensor name; None if the snapshot has no such tensor.
            cast: allow a tensor to keep a type that differs from the saved type.

        Raises:
            JobFailedError: a tensor is not in the snapshot, or was built with another shape or type than the saved one.
        """
        modules = [value for value in objects.values() if isinstance(value, torch.nn.Module)]
        own = {id(tensor) for module in modules for tensor in tensors_of(module)}
        whose = part_name()
        for name, tensor in _of_modules(objects, parts):
            if tensor.numel() > 0 and getattr(tensor, "_local_tensor", tensor).numel() == 0:  # this rank has no shard
                continue
            theirs, here = saved(f"{name}{whose}"), form_of(tensor, name)
            if theirs is None:
                raise JobFailedError(
                    f"{name} is not in the snapshot", hint="Restore with the model and optimizer of the saving job."
                )
            if theirs.form == here:
                continue
            alike = (theirs.built or theirs.form) == self.forms.get(name, here)
            if alike and id(tensor) in own and not is_dtensor(tensor):
                tensor.data = empty(theirs.form, tensor.device)
            elif theirs.shape != here.shape:
                raise JobFailedError(
                    f"{name} has shape {here.shape} here and {theirs.shape} in the snapshot",
                    hint="Restore with the model and optimizer of the saving job.",
                )
            elif theirs.dtype != here.dtype and not cast:
                raise JobFailedError(
                    f"{name} has type {here.dtype} here and {theirs.dtype} in the snapshot",
                    hint=f"Build the tensor as {theirs.dtype}, or convert saved values: run.restore(..., cast=True).",
                )


def tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return a module's parameters and buffers."""
    return [*module.parameters(), *torch.nn.Module.buffers(module)]  # `module.buffers` is a list in Megatron's DDP


def _of_modules(objects: Mapping[str, Any], parts: Parts) -> list[tuple[str, torch.Tensor]]:
    paths, _ = leaf_paths(parts.shape)
    return [
        (fqn(path), tensor)
        for path, tensor in zip(paths, parts.tensors, strict=True)
        if isinstance(objects.get(str(path[0])), torch.nn.Module)
    ]


def _modules(objects: Mapping[str, Any]) -> list[torch.nn.Module]:
    """Return all modules and submodules, each once, in the same order in every process."""
    roots = [value for value in objects.values() if isinstance(value, torch.nn.Module)]
    return list({id(module): module for root in roots for module in root.modules()}.values())


def _now(
    objects: Mapping[str, Any], parameters: Sequence[torch.Tensor]
) -> tuple[dict[str, gradients.Ranges], dict[str, Groups], dict[str, str]]:
    """Return the present flags (`trained`, `training`), parameter groups by optimizer, and types by optimizer."""
    number = {id(parameter): at for at, parameter in enumerate(parameters)}
    optimizers = {name: value for name, value in objects.items() if isinstance(value, torch.optim.Optimizer)}
    groups = {
        name: [[number[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        for name, optimizer in optimizers.items()
    }
    flags = {
        "trained": gradients.ranges(parameter.requires_grad for parameter in parameters),
        "training": gradients.ranges(module.training for module in _modules(objects)),
    }
    return flags, groups, {name: type(value).__name__ for name, value in optimizers.items()}


def _set_groups(optimizer: torch.optim.Optimizer, groups: Sequence[list[torch.Tensor]]) -> None:
    del optimizer.param_groups[len(groups) :]
    kept = len(optimizer.param_groups)
    for group, parameters in zip(optimizer.param_groups, groups, strict=False):
        group["params"] = parameters
    for parameters in groups[kept:]:
        optimizer.add_param_group({"params": parameters})
    grouped = {id(parameter) for parameters in groups for parameter in parameters}
    for parameter in [each for each in optimizer.state if isinstance(each, torch.Tensor) and id(each) not in grouped]:
        del optimizer.state[parameter]


def _loads_by_itself(module: torch.nn.Module) -> bool:
    """Return whether a module overrides `load_state_dict`, which may create missing parameters."""
    return type(module).load_state_dict is not torch.nn.Module.load_state_dict


def keys_of(state: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """Return the keys of one module's state, in the form of `Keys`."""
    first: dict[int, int] = {}
    return tuple(
        (key, first.setdefault(id(value), at) if isinstance(value, torch.Tensor) else at)
        for at, (key, value) in enumerate(state.items())
    )


def _other_keys(name: str, built: Mapping[str, int], now: Mapping[str, int]) -> JobFailedError:
    added, removed = now.keys() - built.keys(), built.keys() - now.keys()
    what = "has got" if added else "has lost" if removed else "has tied, or no longer ties,"
    names = sorted(added or removed or {key for key, first in now.items() if first != built[key]})
    return JobFailedError(
        f"{name} {what} {', '.join(names[:5])} since restore() was called; a new process could not restore this state",
        hint="Build and tie all parameters and buffers before run.restore(). Register buffers that need no snapshot "
        "with persistent=False.",
    )
