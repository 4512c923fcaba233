"""Save and restore which parameters have a gradient between two steps; the gradients' values are mostly not saved.

A gradient of None differs from a zero gradient: optimizers skip the parameter, DDP divides in another way, and adding
to a zero gradient turns -0.0 into 0.0. Therefore a repeated step must begin with a gradient on the same parameters as
the original step. The values of optimizers' gradients are not saved, because a step is committed only when no gradient
waits for its optimizer. The values of gradients of parameters outside all optimizers are saved, because they may add up
from step to step, and affect the norm for gradient clipping.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch

from hyperpod_ext.runtime.snapshot.image import is_dtensor, local_of

Ranges = list[list[int]]
"""Parameter indices, as ranges `[first, last + 1]`. A range of parameters with sparse gradients is
`[first, last + 1, number of sparse dimensions]`."""

_ALIGNMENT = 64


def existing(parameters: Iterable[torch.Tensor]) -> Ranges:
    """Return the indices of the parameters that have a gradient."""
    gradients = [parameter.grad for parameter in parameters]
    return _ranges(None if each is None else [each.sparse_dim()] if each.is_sparse else [] for each in gradients)


def ranges(flags: Iterable[bool]) -> Ranges:
    """Return the indices of the true flags, as ranges."""
    return _ranges([] if flag else None for flag in flags)


def trained_of(module: torch.nn.Module, objects: Iterable[object]) -> str:
    """Return the index ranges of the module's parameters that need gradients, as text.

    For the parameters 0, 1, 2 and 7 the text is `0-3,7-8`. The indices are positions in `parameters(objects)`. The text
    is `?` if one of the parameters that need gradients is not in `objects`.
    """
    number = {id(parameter): at for at, parameter in enumerate(parameters(objects))}
    numbers = {number.get(id(parameter)) for parameter in module.parameters() if parameter.requires_grad}
    if None in numbers:
        return "?"
    return ",".join(f"{low}-{high}" for low, high in ranges(n in numbers for n in range(len(number))))


def _ranges(chosen: Iterable[list[int] | None]) -> Ranges:
    """Return the index ranges of the items that are not None.

    Consecutive items with equal lists form one range: the first index, the last index + 1, and the numbers of the list.
    """
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
    """Set zero gradients on the parameters in `ranges`.

    On the CPU a zero gradient takes memory only when it is first used. Most scripts drop zero gradients before they are
    used, by `zero_grad()`.
    """
    numbered = parameters(objects)
    chosen = [(p, sparse) for low, high, *sparse in ranges for p in numbered[low:high]]  # also for frozen parameters
    memory = _Zeros(sum(_nbytes(local_of(parameter)) for parameter, sparse in chosen if not sparse))
    for parameter, sparse in chosen:
        parameter.grad = _no_elements(parameter, sparse[0]) if sparse else memory.like(parameter)


def _no_elements(parameter: torch.Tensor, sparse_dimensions: int) -> torch.Tensor:
    """Return a sparse gradient without elements for `parameter`."""
    indices = torch.empty(sparse_dimensions, 0, dtype=torch.long, device=parameter.device)
    values = parameter.new_empty(0, *parameter.shape[sparse_dimensions:])
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


class LooseGradients:
    """Gradients of parameters outside all optimizers, if the script keeps them from step to step."""

    def __init__(self) -> None:
        self.values: dict[int, torch.Tensor] = {}
        """Copies of the gradients from the last commit, by parameter index."""
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}

    def hold(self, optimizers: Sequence[torch.optim.Optimizer], numbered: Iterable[torch.Tensor]) -> None:
        """Copy the gradients of parameters outside all optimizers, at the end of a step.

        A gradient that is another tensor than after the last step is not copied: the script drops it between steps.

        Args:
            optimizers: all optimizers of the state.
            numbered: all parameters, in the order of `parameters`.
        """
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
        """Set copies of the kept gradients on the parameters of `objects`."""
        numbered, self._seen = parameters(objects), {}
        for number, value in self.values.items():
            numbered[number].grad = value.clone()


class WaitingGradients:
    """Detects gradients that no optimizer has used yet, as during gradient accumulation."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """By the id of a parameter: the gradient at the end of the last step, with the gradient's version counter."""

    def see(self, optimizers: Sequence[torch.optim.Optimizer], stepped: Container[int]) -> bool:
        """Return whether a gradient waits for an optimizer. Call this at the end of each step.

        A gradient waits if its parameter had no gradient after the last step, or if the same tensor was written again,
        as in a sum over steps. A gradient that was not written since the last step does not wait, because its optimizer
        has used it. A tensor that replaces the last step's gradient does not wait, because the script drops gradients
        between steps.

        Args:
            optimizers: all optimizers of the state.
            stepped: ids of the optimizers that have stepped since the last commit.
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

    Parameters of modules come first, so that their indices do not change when training adds a parameter to an
    optimizer.
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
    """Return the bytes that the zero gradient of `local` takes in `_Zeros`, rounded up to the alignment."""
    return -(-local.nbytes // _ALIGNMENT) * _ALIGNMENT if local.device.type == "cpu" else 0


class _Zeros:
    """Tensors of zeros in an anonymous memory map, whose pages the kernel allocates at the first access."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes) if nbytes else None
        self._used = 0

    def like(self, parameter: Any) -> torch.Tensor:
        local = local_of(parameter)
        if self._memory is None or not local.nbytes or local.device.type != "cpu":
            return torch.zeros_like(parameter)
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=local.nbytes, offset=self._used)
        self._used += _nbytes(local)
        strides = torch.empty_like(local, device="meta").stride()  # the strides that autograd gives a gradient
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
