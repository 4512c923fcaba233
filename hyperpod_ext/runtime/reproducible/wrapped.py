"""The base of all reproducible wrappers, which requires one reduction per step before the optimizer's step."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.reproducible.bins import MOST

_wrapped: weakref.WeakSet[Reproducible] = weakref.WeakSet()
_ATTRIBUTE = "_hpx_reproducible"


class Reproducible(torch.nn.Module):
    """A wrapper that is called like `module`. Each backward pass adds a micro-batch; `reduce` sets the gradients.

    Gradients are *summed* over micro-batches and ranks, and not averaged. So divide the loss by the number of samples
    or tokens that the step has over all ranks.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        _refuse(module)
        before = getattr(module, _ATTRIBUTE, None)
        if before is not None and (old := before()) is not None:
            old.close()
        object.__setattr__(module, _ATTRIBUTE, weakref.ref(self))  # keeps the reference out of the module's state_dict
        self.module = module
        self.count = 0
        """Number of micro-batches that this rank has added since the last `reduce`."""
        self.after_backward: Callable[[], None] = lambda: None
        """Called after each micro-batch that was added. An error in it ends the step."""
        self._owned = {id(parameter) for parameter in module.parameters()}
        if not _wrapped:
            _watch_optimizers()
        _wrapped.add(self)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.module(*arguments, **options)

    @abstractmethod
    def reduce(self) -> None:
        """Set each parameter's gradient to the sum over all micro-batches and ranks. All ranks must call this once per
        step.

        If a gradient is not finite on any rank, it becomes NaN on all ranks.

        Raises:
            JobFailedError: the step has more than 16384 micro-batches.
        """

    @abstractmethod
    def norm(self) -> torch.Tensor:
        """Return the 2-norm of all gradients, with the same bits for any number of ranks. All ranks must call this.
        Calls `reduce` first if needed."""

    @abstractmethod
    def close(self) -> None:
        """Unwrap the module."""

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip this module's gradients as `torch.nn.utils.clip_grad_norm_` does. Returns their norm."""
        norm = self.norm()
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                local_of(parameter.grad).mul_(scale)
        return norm

    def owns(self, parameters: Iterable[torch.Tensor]) -> bool:
        return any(id(parameter) in self._owned for parameter in parameters)

    def _counted(self, contributions: int) -> None:
        """Raise JobFailedError if sums of so many contributions might overflow."""
        if contributions > MOST:
            raise JobFailedError(
                f"reproducible: a step of {contributions} micro-batches; sums are exact up to {MOST}",
                hint="Take larger micro-batches.",
            )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor. Any other tensor is returned unchanged."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def stale() -> JobFailedError:
    return JobFailedError(
        "reproducible: gradients of the last step are still there, and would be added to those of this one",
        hint="Call optimizer.zero_grad(set_to_none=True) before the first backward pass of each step.",
    )


def _refuse(module: torch.nn.Module) -> None:
    if not dist.is_initialized():
        raise JobFailedError(
            "reproducible: there is no process group",
            hint="Call it in a @resilient function, or after torch.distributed.init_process_group.",
        )
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
            raise JobFailedError(
                f"reproducible: {name or 'the module'} ({type(part).__name__}) keeps statistics of the micro-batches "
                "that its rank has seen; they depend on the number of ranks",
                hint="Use LayerNorm, RMSNorm or GroupNorm, or track_running_stats=False.",
            )
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise JobFailedError(
                f"reproducible: {name} is {parameter.dtype}; its gradients would lose bits",
                hint="Parameters of float32, bfloat16 and float16 can be summed.",
            )


def _watch_optimizers() -> None:
    global _watch
    if _watch is None:
        _watch = register_optimizer_step_pre_hook(_before_step)


_watch: Any = None


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for wrapped in _wrapped:
        if wrapped.count and wrapped.owns(p for group in optimizer.param_groups for p in group["params"]):
            raise JobFailedError(
                f"optimizer.step(): gradients of {wrapped.count} micro-batches are not reduced yet",
                hint="Call reduce() of what data_parallel(model, reproducible=True) returned, or its "
                "clip_grad_norm_(), after the last backward pass of the step.",
            )
