"""The base class of reproducible wrappers, and the check that `reduce` is called before the optimizer's step."""

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
    """A wrapper that the script calls in place of `module`.

    Each backward pass adds the gradients of one micro-batch to a sum. `reduce` sets the parameters' gradients to the
    sum over all micro-batches and ranks, not to the average. To get an average, the script must divide each loss by the
    number of samples or tokens that all ranks together process in the step.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        _refuse(module)
        before = getattr(module, _ATTRIBUTE, None)
        if before is not None and (old := before()) is not None:
            old.close()
        object.__setattr__(module, _ATTRIBUTE, weakref.ref(self))  # keep the wrapper out of the module's state_dict
        self.module = module
        self.count = 0
        """Number of micro-batches that this rank has added since the last `reduce`."""
        self.after_backward: Callable[[], None] = lambda: None
        """A function that is called after each micro-batch is added. An error in this function ends the step."""
        self._owned = {id(parameter) for parameter in module.parameters()}
        if not _wrapped:
            _watch_optimizers()
        _wrapped.add(self)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.module(*arguments, **options)

    @abstractmethod
    def reduce(self) -> None:
        """Set each parameter's gradient to the sum over all micro-batches and ranks.

        All ranks must call this method once per step. If a parameter's gradient is not finite on any rank, the gradient
        becomes NaN on all ranks.

        Raises:
            JobFailedError: the step has more than 16384 micro-batches.
        """

    @abstractmethod
    def norm(self) -> torch.Tensor:
        """Return the 2-norm of all gradients, with the same bits for any number of ranks.

        All ranks must call this method. If the step's gradients are not reduced yet, `reduce` is called first.
        """

    @abstractmethod
    def close(self) -> None:
        """Detach this wrapper from the module, before another wrapper takes its place."""

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients as `torch.nn.utils.clip_grad_norm_` does, and return their norm before clipping."""
        norm = self.norm()
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                local_of(parameter.grad).mul_(scale)
        return norm

    def owns(self, parameters: Iterable[torch.Tensor]) -> bool:
        return any(id(parameter) in self._owned for parameter in parameters)

    def _counted(self, contributions: int) -> None:
        """Raise JobFailedError if a sum over `contributions` micro-batches might overflow."""
        if contributions > MOST:
            raise JobFailedError(
                f"reproducible: the step has {contributions} micro-batches, but sums are exact only up to {MOST}",
                hint="Use fewer and larger micro-batches.",
            )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor. A tensor that is no DTensor is returned unchanged."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def stale() -> JobFailedError:
    return JobFailedError(
        "reproducible: gradients of the last step still exist, and would be added to the gradients of this step",
        hint="Call optimizer.zero_grad(set_to_none=True) before the first backward pass of each step.",
    )


def _refuse(module: torch.nn.Module) -> None:
    if not dist.is_initialized():
        raise JobFailedError(
            "reproducible: there is no process group yet",
            hint="Wrap the module inside a @resilient function, or after torch.distributed.init_process_group.",
        )
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
            raise JobFailedError(
                f"reproducible: {name or 'the module'} ({type(part).__name__}) keeps statistics of the micro-batches "
                "on its rank, and these statistics depend on the number of ranks",
                hint="Use LayerNorm, RMSNorm or GroupNorm, or track_running_stats=False.",
            )
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise JobFailedError(
                f"reproducible: {name} is {parameter.dtype}; its gradients would lose bits",
                hint="Use parameters of type float32, bfloat16 or float16.",
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
                hint="After the last backward pass of the step, call reduce() or clip_grad_norm_() of the object that "
                "data_parallel(model, reproducible=True) has returned.",
            )
