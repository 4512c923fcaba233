"""Reproducible gradient sums for models that are complete on every rank, as with DDP.

After each micro-batch's backward pass, its gradients are added to bins (integer sums, see `bins`). `reduce` sums the
bins over the ranks as int64, part by part, so that packing one part overlaps with the all-reduce of another.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from hyperpod_ext.runtime.reproducible.bins import BAD, NONE, Sum, bin_of, largest_of, value_of
from hyperpod_ext.runtime.reproducible.wrapped import Reproducible, stale

_PART = 1 << 22
"""Maximum number of int64 values in one all-reduce (32 MiB). A parameter with more values has its own all-reduce."""


class Replicated(Reproducible):
    """See `Reproducible`. From the first backward pass on, the bins take 12 bytes of memory per trained parameter."""

    def __init__(self, module: torch.nn.Module, *, init_sync: bool = True) -> None:
        super().__init__(module)
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._sums: list[Sum | None] = [None] * len(self._trained)
        self._given: list[weakref.ref[torch.Tensor] | None] = [None] * len(self._trained)
        self._queued = False
        own = weakref.ref(self)

        def arrived(_: torch.Tensor) -> None:
            if (wrapped := own()) is not None:
                wrapped._arrived()

        self._hooks = [parameter.register_post_accumulate_grad_hook(arrived) for parameter in self._trained]
        if init_sync:
            with torch.no_grad():
                for tensor in (*module.parameters(), *module.buffers()):
                    dist.broadcast(tensor, 0)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        self._queued = False  # reset the flag, because the callback of a failed backward pass did not run
        return self.module(*arguments, **options)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._sums, self.count = [], [None] * len(self._trained), 0

    def _arrived(self) -> None:
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._absorb)

    @torch.no_grad()
    def _absorb(self) -> None:
        """Add the gradients of one micro-batch to the bins, after its backward pass."""
        self._queued = False
        found = [(i, p, p.grad) for i, p in enumerate(self._trained) if p.grad is not None]
        for i, _, gradient in found:
            given = self._given[i]
            if given is not None and given() is gradient:
                raise stale()
        self._counted(self.count + 1)
        largest = largest_of([gradient for *_, gradient in found])
        for (i, parameter, gradient), most in zip(found, largest, strict=True):
            held = self._sums[i]
            if held is None:
                held = self._sums[i] = Sum(parameter.numel(), parameter.device)
            held.add(gradient, bin_of(most))
            parameter.grad = None
        self.count += 1
        self.after_backward()

    @torch.no_grad()
    def reduce(self) -> None:
        tops = [NONE if held is None else held.top for held in self._sums]
        agreed = torch.tensor([*tops, self.count], dtype=torch.int32, device=self._device())
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        *tops, most = agreed.tolist()
        self._counted(most * dist.get_world_size())
        for i, top in enumerate(tops):
            if top != NONE and self._sums[i] is None:
                self._sums[i] = Sum(self._trained[i].numel(), self._trained[i].device)
        waiting = None
        for part in self._parts(tops):
            sums = self._packed(part, tops)
            work = dist.all_reduce(sums, dist.ReduceOp.SUM, async_op=True)
            if waiting is not None:
                self._give(*waiting, tops)
            waiting = (part, sums, work)
        if waiting is not None:
            self._give(*waiting, tops)
        self.count = 0

    def norm(self) -> torch.Tensor:
        # reduce even on a rank without a micro-batch in this step, because all ranks must take part
        if self.count or not self._is_reduced():
            self.reduce()
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        # all ranks have all gradients, so every rank adds the squares in the same order
        return torch.nn.utils.get_total_norm(gradients)

    def _is_reduced(self) -> bool:
        """Return whether `reduce` was called in this step.

        After `reduce`, the gradients that it has set still exist, because the script drops gradients only before the
        next step.
        """
        given = [None if held is None else held() for held in self._given]
        return any(held is not None and held is p.grad for held, p in zip(given, self._trained, strict=True))

    def _parts(self, tops: list[int]) -> Iterator[list[int]]:
        """Yield groups of parameter indices, with one all-reduce for each group.

        A parameter whose sum is not finite is in no group, and gets a NaN gradient.
        """
        part, numel = list[int](), 0
        for i, top in enumerate(tops):
            if top in (NONE, BAD):
                continue
            if part and numel + self._trained[i].numel() > _PART:
                yield part
                part, numel = [], 0
            part.append(i)
            numel += self._trained[i].numel()
        if part:
            yield part
        for i, top in enumerate(tops):
            if top == BAD:
                self._set(i, torch.full_like(self._trained[i], math.nan))

    def _packed(self, part: list[int], tops: list[int]) -> torch.Tensor:
        numel = sum(self._trained[i].numel() for i in part)
        packed = torch.empty(numel, dtype=torch.int64, device=self._device())
        for i, own in zip(part, self._split(packed, part), strict=True):
            held = self._sums[i]
            assert held is not None
            held.raise_to(tops[i])
            held.pack(own)
        return packed

    def _split(self, numbers: torch.Tensor, part: list[int]) -> tuple[torch.Tensor, ...]:
        return torch.split(numbers, [self._trained[i].numel() for i in part])

    def _give(self, part: list[int], sums: torch.Tensor, work: Any, tops: list[int]) -> None:
        work.wait()
        for i, own in zip(part, self._split(sums, part), strict=True):
            parameter = self._trained[i]
            self._set(i, value_of(own, tops[i]).to(parameter.dtype).view_as(parameter))

    def _set(self, i: int, gradient: torch.Tensor) -> None:
        self._trained[i].grad = gradient
        self._given[i] = weakref.ref(gradient)
        held = self._sums[i]
        assert held is not None
        held.clear()

    def _device(self) -> torch.device:
        return self._trained[0].device
