"""Reset FSDP2 modules after a fault in a forward or backward pass.

Torch has no public function to reset an FSDP2 module. This file uses private attributes of torch, which
`torch_requirements/private_names.py` lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyperpod_ext.runtime.torch_requirements.private_names import Feature, missing


def can_be_reset() -> bool:
    """Return whether this version of torch allows an FSDP2 module to be used again after an interrupted pass."""
    return not Feature.KEPT_FSDP2.is_loaded or not missing(Feature.KEPT_FSDP2)


def reset(states: Sequence[Any]) -> None:
    """Shard the parameters of FSDP2 modules again, and drop unfinished gradients and collectives.

    Args:
        states: the `FSDPState` of every FSDP2 module in this process.
    """
    for state in states:
        for group in state._fsdp_param_groups:
            group._all_gather_result = None  # waiting for the all-gather would raise the fault's error
            for parameter in group.fsdp_params:
                _drop_unsharded_gradient(parameter)
    roots = [state for state in states if state._is_root]  # torch sets `_is_root` in the first forward pass
    for root in roots:
        _drop_gradient_reduction(root._comm_ctx)
    for root in roots:
        root._reset_iter_state()


def _drop_unsharded_gradient(parameter: Any) -> None:
    """Drop the unsharded gradient of an `FSDPParam`."""
    if hasattr(parameter, "_unsharded_param"):
        parameter._unsharded_param.grad = None
    if "unsharded_accumulated_grad" in vars(parameter):  # in torch 2.15, this is a property, which vars() omits
        parameter.unsharded_accumulated_grad = None


def _drop_gradient_reduction(communication: Any) -> None:
    """Drop the unfinished gradient reduction of an `FSDPCommContext`, even if several FSDP2 roots share the context."""
    if hasattr(communication, "active_gradient_reduction"):  # torch 2.15 and later have this attribute
        communication.active_gradient_reduction = None
