"""Gradients between two steps: which ones exist is part of a step's state, though their values are not.

A parameter whose gradient is None takes another way than one whose gradient is zero: optimizers skip it, DDP divides
otherwise, and adding to zero turns -0.0 into 0.0. So a step that is made again begins with the gradients that existed
when the one before was committed. Their values do not matter: a step is committed when no gradient waits for its
optimizer. Only gradients of parameters that no optimizer has may add up from step to step, and count when a norm is
clipped: their values are state.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch

from hyperpod_ext.runtime.snapshot.image import is_dtensor

Ranges = list[list[int]]
"""Numbers of parameters, as ranges `[first, behind the last]`; of sparse gradients `[first, behind the last, number of
sparse dimensions]`."""

_ALIGNMENT = 64


def existing(parameters: Iterable[torch.Tensor]) -> Ranges:
    """Those of these parameters that have a gradient, by their numbers."""
    gradients = [parameter.grad for parameter in parameters]
    return _ranges(None if each is None else [each.sparse_dim()] if each.is_sparse else [] for each in gradients)


def ranges(flags: Iterable[bool]) -> Ranges:
    """Numbers of the flags that are true."""
    return _ranges([] if flag else None for flag in flags)


def trained_of(module: torch.nn.Module, objects: Iterable[object]) -> str:
    """Numbers of those parameters of `module` that need gradients, such as `0-3,7-8`; `?`: one is not of `objects`."""
    number = {id(parameter): at for at, parameter in enumerate(parameters(objects))}
    numbers = {number.get(id(parameter)) for parameter in module.parameters() if parameter.requires_grad}
    if None in numbers:
        return "?"
    return ",".join(f"{low}-{high}" for low, high in ranges(n in numbers for n in range(len(number))))


def _ranges(chosen: Iterable[list[int] | None]) -> Ranges:
    """Numbers of those that are not None; of neighbours with the same list one range, which that list is added to."""
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
    """Give these parameters gradients of zero. On the CPU they take memory once they are used: most scripts drop them
    before that."""
    numbered = parameters(objects)
    chosen = [(p, sparse) for low, high, *sparse in ranges for p in numbered[low:high]]  # frozen ones, too
    memory = _Zeros(sum(_nbytes(_local(parameter)) for parameter, sparse in chosen if not sparse))
    for parameter, sparse in chosen:
        parameter.grad = _no_elements(parameter, sparse[0]) if sparse else memory.like(parameter)


def _no_elements(parameter: torch.Tensor, sparse_dimensions: int) -> torch.Tensor:
    """A sparse gradient of zero."""
    indices = torch.empty(sparse_dimensions, 0, dtype=torch.long, device=parameter.device)
    values = parameter.new_empty(0, *parameter.shape[sparse_dimensions:])
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


class LooseGradients:
    """Gradients of parameters that no optimizer has, and that nothing drops between two steps."""

    def __init__(self) -> None:
        self.values: dict[int, torch.Tensor] = {}
        """Copies as of the last commit, by the number of the parameter."""
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}

    def hold(self, optimizers: Sequence[torch.optim.Optimizer], numbered: Iterable[torch.Tensor]) -> None:
        """Copy them: a step has ended. One that was made anew since the last step was dropped in between.
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
        """Give the parameters these gradients again."""
        numbered, self._seen = parameters(objects), {}
        for number, value in self.values.items():
            numbered[number].grad = value.clone()


class WaitingGradients:
    """Whether optimizers that have not stepped have gradients that wait for that. Told of the end of each step."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """Gradient of each parameter at the end of the last step, and its version."""

    def see(self, optimizers: Sequence[torch.optim.Optimizer], stepped: Container[int]) -> bool:
        """A step has ended; `stepped` are the ids of those optimizers that have stepped since the last commit.

        A gradient that nothing has written to since the last step was used by then. One that took the place of
        another was dropped in between, and so will this one be. One that was written to again may be a sum over steps.
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
    """Parameters of modules and optimizers, each once, in an order that is the same in every process: those of modules
    first, because training may give others to an optimizer."""
    every, found = list(objects), dict[int, torch.Tensor]()
    for module in every:
        if isinstance(module, torch.nn.Module):
            found |= {id(parameter): parameter for parameter in module.parameters()}
    for optimizer in every:
        if isinstance(optimizer, torch.optim.Optimizer):
            found |= {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    return list(found.values())


def _local(parameter: Any) -> torch.Tensor:
    local: torch.Tensor = (parameter.to_local() if is_dtensor(parameter) else parameter).detach()
    return local


def _nbytes(local: torch.Tensor) -> int:
    """Room that zeros like this take here."""
    return -(-local.nbytes // _ALIGNMENT) * _ALIGNMENT if local.device.type == "cpu" else 0


class _Zeros:
    """Tensors of zeros in memory that the kernel hands out when it is touched."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes) if nbytes else None
        self._used = 0

    def like(self, parameter: Any) -> torch.Tensor:
        local = _local(parameter)
        if self._memory is None or not local.nbytes or local.device.type != "cpu":
            return torch.zeros_like(parameter)
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=local.nbytes, offset=self._used)
        self._used += _nbytes(local)
        strides = torch.empty_like(local, device="meta").stride()  # those that autograd would make
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
