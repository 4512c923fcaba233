"""Reset FSDP2 modules after a fault in a forward or backward pass.

Torch has no public function for it. The private attributes used here are listed in
`torch_requirements/private_names.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyperpod_ext.runtime.torch_requirements.private_names import Feature, missing


def can_be_reset() -> bool:
    """Return whether an interrupted FSDP2 module can be used again with this torch."""
    return not Feature.KEPT_FSDP2.is_loaded or not missing(Feature.KEPT_FSDP2)


def reset(states: Sequence[Any]) -> None:
    """Shard the parameters again, and drop unfinished gradients and collectives.

    Args:
        states: `FSDPState` of every FSDP2 module of this process; a root also resets its submodules.
    """
    for state in states:
        for group in state._fsdp_param_groups:
            group._all_gather_result = None  # never completes; waiting would raise the fault's error
            for parameter in group.fsdp_params:
                _drop_unsharded_gradient(parameter)
    roots = [state for state in states if state._is_root]  # set at the first forward
    for root in roots:
        _drop_gradient_reduction(root._comm_ctx)
    for root in roots:
        root._reset_iter_state()


def _drop_unsharded_gradient(parameter: Any) -> None:
    """Drop the unsharded gradient of an `FSDPParam`."""
    if hasattr(parameter, "_unsharded_param"):
        parameter._unsharded_param.grad = None
    if "unsharded_accumulated_grad" in vars(parameter):  # in torch 2.15 a property, of the gradient above
        parameter.unsharded_accumulated_grad = None


def _drop_gradient_reduction(communication: Any) -> None:
    """Drop the reduction of an `FSDPCommContext`, which several roots may share: only its first root could reset it."""
    if hasattr(communication, "active_gradient_reduction"):  # torch 2.15 has it
        communication.active_gradient_reduction = None
