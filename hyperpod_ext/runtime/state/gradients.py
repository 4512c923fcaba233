"""Gradients between two steps: their existence is part of a step's state, though their values are not.

A gradient of None differs from a zero gradient: optimizers skip it, DDP divides otherwise, and adding to zero turns
-0.0 into 0.0. So a repeated step begins with the gradients that existed when the step before was committed. Their
values do not matter: a step is committed when no gradient waits for its optimizer. Only gradients of parameters outside
all optimizers may add up from step to step, and count when a norm is clipped: their values are state.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch

from hyperpod_ext.runtime.snapshot.image import is_dtensor, local_of

Ranges = list[list[int]]
"""Numbers of parameters, as ranges `[first, last + 1]`; of sparse gradients `[first, last + 1, number of sparse
dimensions]`."""

_ALIGNMENT = 64


def existing(parameters: Iterable[torch.Tensor]) -> Ranges:
    """Return the numbers of the parameters with a gradient."""
    gradients = [parameter.grad for parameter in parameters]
    return _ranges(None if each is None else [each.sparse_dim()] if each.is_sparse else [] for each in gradients)


def ranges(flags: Iterable[bool]) -> Ranges:
    """Return the numbers of the true flags."""
    return _ranges([] if flag else None for flag in flags)


def trained_of(module: torch.nn.Module, objects: Iterable[object]) -> str:
    """Return the numbers of the module's parameters that need gradients: `0-3,7-8`; `?` if one is not in `objects`."""
    number = {id(parameter): at for at, parameter in enumerate(parameters(objects))}
    numbers = {number.get(id(parameter)) for parameter in module.parameters() if parameter.requires_grad}
    if None in numbers:
        return "?"
    return ",".join(f"{low}-{high}" for low, high in ranges(n in numbers for n in range(len(number))))


def _ranges(chosen: Iterable[list[int] | None]) -> Ranges:
    """Return ranges of the items that are not None; consecutive equal lists make one range, with the list appended."""
    ranges: Ranges = []
    for number, more in enumerate(chosen):
        if more is None:
            continue
        if ranges and ranges[-1][1:] == [number, *more]:
            ranges[-1][1] = number + 1
        else:
            ranges.append([number, number + 1, *more])
    return ranges


def give_zeros(objects: Iterable[object], ranges: Sequence[Sequence[int]]) -> None:
    """Set zero gradients on these parameters. On the CPU they take memory only when used; most are dropped before."""
    numbered = parameters(objects)
    chosen = [(p, sparse) for low, high, *sparse in ranges for p in numbered[low:high]]  # frozen ones, too
    memory = _Zeros(sum(_nbytes(local_of(parameter)) for parameter, sparse in chosen if not sparse))
    for parameter, sparse in chosen:
        parameter.grad = _no_elements(parameter, sparse[0]) if sparse else memory.like(parameter)


def _no_elements(parameter: torch.Tensor, sparse_dimensions: int) -> torch.Tensor:
    """Return a sparse zero gradient."""
    indices = torch.empty(sparse_dimensions, 0, dtype=torch.long, device=parameter.device)
    values = parameter.new_empty(0, *parameter.shape[sparse_dimensions:])
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


class LooseGradients:
    """Gradients that are kept between steps, of parameters outside all optimizers."""

    def __init__(self) -> None:
        self.values: dict[int, torch.Tensor] = {}
        """Copies from the last commit, by parameter number."""
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}

    def hold(self, optimizers: Sequence[torch.optim.Optimizer], numbered: Iterable[torch.Tensor]) -> None:
        """Copy these gradients at the end of a step, except new tensors: the script drops those between steps.

        `numbered`: all parameters."""
        grouped = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
        loose = {
            number: parameter.grad
            for number, parameter in enumerate(numbered if optimizers else ())
            if parameter.grad is not None and id(parameter) not in grouped and not parameter.grad.is_sparse
        }
        kept = {n: each for n, each in loose.items() if n not in self._seen or self._seen[n]() is each}
        self.values = {number: gradient.detach().clone() for number, gradient in kept.items()}
        self._seen = {number: weakref.ref(gradient) for number, gradient in loose.items()}

    def give(self, objects: Iterable[object]) -> None:
        """Set these gradients on the parameters again."""
        numbered, self._seen = parameters(objects), {}
        for number, value in self.values.items():
            numbered[number].grad = value.clone()


class WaitingGradients:
    """Detects gradients that wait for an optimizer's next step. Called at the end of each step."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """Each parameter's gradient at the end of the last step, with its version."""

    def see(self, optimizers: Sequence[torch.optim.Optimizer], stepped: Container[int]) -> bool:
        """Return whether a gradient waits. `stepped`: ids of the optimizers that have stepped since the last commit.

        A gradient without a write since the last step was used by then. A new tensor means that the script drops
        gradients between steps. The same tensor with a new write may be a sum over steps.
        """
        before = self._seen
        self._seen = {
            id(parameter): (weakref.ref(parameter.grad), parameter.grad._version)
            for parameter in parameters(optimizers)
            if parameter.grad is not None
        }
        waiting = parameters([optimizer for optimizer in optimizers if id(optimizer) not in stepped])
        return any(_waits(parameter.grad, before.get(id(parameter))) for parameter in waiting)


def _waits(gradient: torch.Tensor | None, before: tuple[weakref.ref[torch.Tensor], int] | None) -> bool:
    if gradient is None:
        return False
    if before is None:
        return True
    known, version = before
    return known() is gradient and gradient._version != version


def parameters(objects: Iterable[object]) -> list[torch.Tensor]:
    """Return the parameters of modules and optimizers, each once, in the same order in every process.

    Parameters of modules come first, because training may add others to an optimizer.
    """
    every, found = list(objects), dict[int, torch.Tensor]()
    for module in every:
        if isinstance(module, torch.nn.Module):
            found |= {id(parameter): parameter for parameter in module.parameters()}
    for optimizer in every:
        if isinstance(optimizer, torch.optim.Optimizer):
            found |= {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    return list(found.values())


def _nbytes(local: torch.Tensor) -> int:
    """Return the size of such zeros in `_Zeros`."""
    return -(-local.nbytes // _ALIGNMENT) * _ALIGNMENT if local.device.type == "cpu" else 0


class _Zeros:
    """Tensors of zeros in memory that the kernel allocates at the first access."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes) if nbytes else None
        self._used = 0

    def like(self, parameter: Any) -> torch.Tensor:
        local = local_of(parameter)
        if self._memory is None or not local.nbytes or local.device.type != "cpu":
            return torch.zeros_like(parameter)
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=local.nbytes, offset=self._used)
        self._used += _nbytes(local)
        strides = torch.empty_like(local, device="meta").stride()  # as made by autograd
        zeros = flat.view(local.dtype).as_strided(local.size(), strides)
        if not is_dtensor(parameter):
            return zeros
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            zeros,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.size(),
            stride=parameter.stride(),
        )
