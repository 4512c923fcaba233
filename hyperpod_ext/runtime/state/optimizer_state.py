"""Estimate the size of an optimizer's state before its first step, and load and check a saved state."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.snapshot.image import local_of

_FRAME_BYTES = 2048
"""Maximum overhead of each tensor in the image."""
_LIKE_ADAM = 2.0


def bytes_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Return the estimated bytes of state that `optimizer` will make; the first save may exceed it."""
    if optimizer.state:
        return 0
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    nbytes = sum(local_of(parameter).nbytes for parameter in parameters)
    per_parameter = _state_per_byte(optimizer)
    return int(nbytes * per_parameter) + int(len(parameters) * (per_parameter + 1) * _FRAME_BYTES)


def _state_per_byte(optimizer: torch.optim.Optimizer) -> float:
    """Return the bytes of state per byte of parameters, measured on an optimizer of the same type."""
    known = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    try:
        parameter = torch.nn.Parameter(torch.zeros(64, 64))
        probe = type(optimizer)([parameter], **options)
        parameter.grad = torch.zeros_like(parameter)
        probe.step()
    except Exception:  # it cannot be constructed like this: assume Adam
        return _LIKE_ADAM
    state = [value for value in probe.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in state) / parameter.nbytes


def load_state(name: str, optimizer: torch.optim.Optimizer, tree: Any, *, cast: bool) -> None:
    """Load a saved state into an optimizer, in the saved types, unless `cast`.

    Raises:
        JobFailedError: the saved groups lack needed options: another type of optimizer saved them.
    """
    needed = optimizer.defaults.keys() & set().union(*optimizer.param_groups)
    optimizer.load_state_dict(tree)
    for group in optimizer.param_groups:
        if lacking := sorted(needed - group.keys()):
            raise JobFailedError(
                f"{name} is an optimizer of type {type(optimizer).__name__} here; the snapshot has the state of "
                f"another type, without {', '.join(lacking)}",
                hint="Restore with the optimizer that saved it, or start a job with another name.",
            )
    if not cast:
        _keep_types(optimizer, tree)


def _keep_types(optimizer: torch.optim.Optimizer, tree: Mapping[str, Any]) -> None:
    """Restore the saved types: `load_state_dict` has converted the state to the parameters' types."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in tree.get("param_groups", ()) for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):
        current = optimizer.state.get(parameter, {})
        for key, saved in tree["state"].get(number, {}).items():
            if isinstance(saved, torch.Tensor) and key in current and current[key].dtype != saved.dtype:
                current[key] = saved.to(current[key].device)
