"""Optimizers make their state at their first step. How large it will be, and how they make it before."""

from __future__ import annotations

import inspect

import torch

from hyperpod_ext.runtime.snapshot.image import is_dtensor

_FRAME_BYTES = 2048
"""At most, around each tensor in the image."""
_LIKE_ADAM = 2.0


def bytes_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that `optimizer` has not made yet; an estimate, which a first save may exceed."""
    if optimizer.state:
        return 0
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    local = [p.to_local() if is_dtensor(p) else p for p in parameters]
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in local)
    per_parameter = _state_per_byte(optimizer)
    return int(nbytes * per_parameter) + int(len(parameters) * (per_parameter + 1) * _FRAME_BYTES)


def _state_per_byte(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of state to a byte of parameters, seen on an optimizer of the same kind with one small parameter."""
    known = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    try:
        parameter = torch.nn.Parameter(torch.zeros(64, 64))
        probe = type(optimizer)([parameter], **options)
        parameter.grad = torch.zeros_like(parameter)
        probe.step()
    except Exception:  # one that cannot be made so is taken for the most usual one
        return _LIKE_ADAM
    state = [value for value in probe.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in state) / parameter.nbytes


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer make its state ahead, by a step that changes no parameter: without gradient, at rate 0.

    As `_init_optim_state` of `torch.distributed.checkpoint.state_dict`, whose import takes a new process 60 ms, while
    all others wait for it.
    """
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    if optimizer.state or any(parameter.grad is not None for parameter in parameters):
        return
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    rates = [(group, group["lr"]) for group in groups if "lr" in group]
    for group, rate in rates:
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    optimizer.step()
    for group, rate in rates:
        group["lr"] = rate
    optimizer.zero_grad()
