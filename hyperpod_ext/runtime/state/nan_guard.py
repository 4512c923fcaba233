"""Detect a loss or gradient that is not finite on any rank, before an optimizer steps.

The check costs one pass over the gradients and one all-reduce of three numbers in each step. A skipped step changes
neither parameters, nor the optimizer's state, nor buffers such as batch norm's statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from hyperpod_ext.config.detection import NanPolicy
from hyperpod_ext.errors import JobFailedError, NonFiniteError


class LogEvent(Protocol):
    def __call__(self, event: str, **fields: Any) -> None: ...


class NanGuard:
    """Checks loss and gradients before each optimizer step; if a value is not finite, raises an error or skips the
    step.

    Args:
        policy: the action, and how many steps in a row may be skipped.
        rank: this process's rank.
        report: writes an event for each skipped step.
    """

    def __init__(self, policy: NanPolicy, rank: int, report: LogEvent) -> None:
        self._policy, self._rank, self._report = policy, rank, report
        self._hooks: list[RemovableHandle] = []
        self._names: dict[int, str] = {}
        self._losses: list[torch.Tensor] = []
        self._modules: list[torch.nn.Module] = []
        """Modules and submodules whose buffers are copied; filled only for the action `skip`."""
        self._kept: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}
        """By module index and buffer name: the buffer at the start of the step, and a copy of its values. The buffer
        object is kept because a script may assign a new tensor."""
        self._step, self._in_a_row, self._skipped = 0, 0, False

    def attach(self, objects: Mapping[str, object]) -> None:
        """Guard the optimizers in `objects`, and no longer the optimizers of earlier calls.

        Raises:
            JobFailedError: the action is `skip`, and there is more than one optimizer.
        """
        self.close()
        if self._policy.action == "off":
            return
        optimizers = [value for value in objects.values() if isinstance(value, torch.optim.Optimizer)]
        modules = {name: value for name, value in objects.items() if isinstance(value, torch.nn.Module)}
        if self._policy.action == "skip":
            if len(optimizers) > 1:
                raise JobFailedError(
                    f"restart.nan: action `skip` needs one optimizer, and {len(optimizers)} are registered",
                    hint="One optimizer may have stepped before another finds bad gradients. Use action `raise`.",
                )
            self._modules = [inner for module in modules.values() for inner in torch.nn.Module.modules(module)]
            self._kept = {}
        self._names = {
            id(parameter): f"{name}.{inner}" for name, m in modules.items() for inner, parameter in m.named_parameters()
        }
        self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]

    def close(self) -> None:
        """Stop guarding."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def begin_step(self, step: int) -> None:
        """Begin a step: copy the modules' buffers, which the forward pass may change."""
        if self._policy.action == "off":
            return
        self._step, self._losses, self._skipped = step, [], False
        self._kept = {}  # free the old copies before new ones are made
        self._kept = {key: (buffer, buffer.detach().clone()) for key, buffer in self._buffers()}

    def end_step(self) -> None:
        """End a step, and count skipped steps in a row."""
        self._in_a_row = self._in_a_row + 1 if self._skipped else 0

    def see(self, loss: torch.Tensor) -> None:
        """Add `loss` to the next check, so that an error can name the rank with a loss that is not finite."""
        if self._policy.action != "off":
            self._losses.append(loss.detach())

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        ranks = dist.get_world_size()
        device = parameters[0].grad.device if parameters else torch.device("cpu")
        bad_gradient = ~finite([_local(p.grad) for p in parameters], device)
        bad_loss = ~finite(self._losses, device)
        # the maximum of `ranks - rank` yields the lowest rank with a bad value
        flags = torch.stack([bad_gradient, bad_gradient * (ranks - self._rank), bad_loss * (ranks - self._rank)])
        flags = flags.to(torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        bad, gradient, loss = flags.tolist()
        if not bad and not loss:
            return
        why = self._describe(parameters, ranks - gradient if gradient else None, ranks - loss if loss else None)
        if self._policy.action == "raise" or self._in_a_row >= self._policy.max_skips:
            raise NonFiniteError(
                why + (f", after {self._in_a_row} skipped steps in a row" if self._in_a_row else ""),
                hint="Lower the learning rate, clip gradients, or look at the batch of this step.",
            )
        self._skip(parameters)
        self._report("skipped", rank=self._rank, step=self._step, cause=why)

    def _skip(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Skip the step: remove all gradients, and set the buffers to their values from before the forward pass."""
        self._skipped = True
        for parameter in parameters:
            parameter.grad = None  # optimizers skip parameters without a gradient
        with torch.no_grad():
            for buffer, copy in self._kept.values():
                buffer.copy_(copy)
        for at, name in {*self._kept, *(key for key, _ in self._buffers())}:
            before, _ = self._kept.get((at, name), (None, None))
            if getattr(self._modules[at], name) is not before:
                setattr(self._modules[at], name, before)

    def _buffers(self) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
        """Yield each buffer of the modules, with its module index and name."""
        for at, module in enumerate(self._modules):
            for name, buffer in torch.nn.Module.named_buffers(module, recurse=False):
                yield (at, name), buffer

    def _describe(self, parameters: Iterable[torch.nn.Parameter], gradient: int | None, loss: int | None) -> str:
        found = [f"the loss of rank {loss}"] if loss is not None else []
        if gradient is not None:
            own = next((p for p in parameters if not finite([_local(p.grad)], _local(p.grad).device)), None)
            where = f" (first on this rank: {self._names.get(id(own), 'a parameter')})" if own is not None else ""
            found.append(f"a gradient on rank {gradient}{where}")
        return f"step {self._step}: {' and '.join(found)} {'is' if len(found) == 1 else 'are'} not finite"


def finite(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return whether the norms of all tensors are finite, as a boolean tensor on `device`.

    This check does not wait for the device.
    """
    floating = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not floating:
        return torch.tensor(True, device=device)
    halves = [tensor for tensor in floating if tensor.dtype == torch.float16]
    others = [tensor for tensor in floating if tensor.dtype != torch.float16]
    norms = [*torch._foreach_norm(others)] if others else []
    if halves:  # norms of finite float16 values may overflow float16
        norms += torch._foreach_norm(halves, dtype=torch.float32)
    return torch.isfinite(torch.stack([norm.to(device, torch.float32) for norm in norms]).sum())


def _local(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a DTensor, the values of a sparse tensor, or any other tensor unchanged."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.coalesce().values() if local.is_sparse else local
