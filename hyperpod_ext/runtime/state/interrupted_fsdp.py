"""FSDP2 modules that a fault interrupted in a forward or backward pass, made fit for the next one.

Torch has no public function for it. The attributes of its own that are used here are in
`torch_requirements/private_names.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyperpod_ext.runtime.torch_requirements.private_names import Feature, missing


def can_be_reset() -> bool:
    """Whether this torch lets an FSDP2 module that was interrupted be used again."""
    return not Feature.KEPT_FSDP2.is_loaded or not missing(Feature.KEPT_FSDP2)


def reset(states: Sequence[Any]) -> None:
    """Shard the parameters again, and drop gradients and collectives that the fault left unfinished.

    Args:
        states: `FSDPState` of every FSDP2 module of this process: a root resets those below it, too.
    """
    for state in states:
        for group in state._fsdp_param_groups:
            group._all_gather_result = None  # nobody will complete it; waiting for it would raise what the fault did
            for parameter in group.fsdp_params:
                _drop_unsharded_gradient(parameter)
    roots = [state for state in states if state._is_root]  # known from its first forward on
    for root in roots:
        _drop_gradient_reduction(root._comm_ctx)
    for root in roots:
        root._reset_iter_state()


def _drop_unsharded_gradient(parameter: Any) -> None:
    """Of an `FSDPParam`."""
    if hasattr(parameter, "_unsharded_param"):
        parameter._unsharded_param.grad = None
    if "unsharded_accumulated_grad" in vars(parameter):  # in torch 2.15 a property, of the gradient above
        parameter.unsharded_accumulated_grad = None


def _drop_gradient_reduction(communication: Any) -> None:
    """Of an `FSDPCommContext`, which several roots may share: only the one that began it could reset it."""
    if hasattr(communication, "active_gradient_reduction"):  # torch 2.15 has it
        communication.active_gradient_reduction = None
