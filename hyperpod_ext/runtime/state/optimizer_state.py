"""Estimate the size of an optimizer's state before its first step, and load a saved state with checks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.snapshot.image import local_of

_FRAME_BYTES = 2048
"""Maximum number of bytes that a tensor takes in a snapshot in addition to its values."""
_LIKE_ADAM = 2.0
"""Bytes of Adam's state per byte of parameters."""


def bytes_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Return an estimate of the bytes of state that `optimizer` will create in its first step; 0 if it has state.

    The real state may be larger than the estimate.
    """
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
    except Exception:  # assume Adam's state if this type needs other arguments
        return _LIKE_ADAM
    state = [value for value in probe.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in state) / parameter.nbytes


def load_state(name: str, optimizer: torch.optim.Optimizer, tree: Any, *, cast: bool) -> None:
    """Load a saved state into an optimizer.

    Args:
        name: the optimizer's name in `restore`, for errors.
        optimizer: the optimizer, changed in place.
        tree: the saved `state_dict()`.
        cast: convert the state to the parameters' types instead of keeping the saved types.

    Raises:
        JobFailedError: the saved parameter groups lack options of this optimizer, so another type of optimizer saved
            them.
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
    """Convert an optimizer's state back to the saved types, after `load_state_dict` has changed the types."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in tree.get("param_groups", ()) for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):
        current = optimizer.state.get(parameter, {})
        for key, saved in tree["state"].get(number, {}).items():
            if isinstance(saved, torch.Tensor) and key in current and current[key].dtype != saved.dtype:
                current[key] = saved.to(current[key].device)
