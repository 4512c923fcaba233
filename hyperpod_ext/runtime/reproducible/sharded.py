"""For FSDP2 and HSDP. Each backward pass scatters its gradients as int32 bins, and each rank sums the bins of its
shards.

FSDP2 gets zeros instead of gradients: views of one flat tensor per parameter group, into which `reduce` writes the
sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.reproducible.bins import BAD, Sum, add_bins, bin_of, largest_of, value_of
from hyperpod_ext.runtime.reproducible.wrapped import Reproducible, local_of, stale

# the second name is that of older versions
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Sharded(Reproducible):
    """See `Reproducible`. The bins take 12 bytes per parameter in this rank's shards."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self._groups: list[_Group] = []
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                raise JobFailedError(
                    f"reproducible: {name} belongs to no FSDP2 module, though others do",
                    hint="Call fully_shard on the outermost module, too.",
                )
        for part in parts:
            for inner in _state(part)._fsdp_param_groups:
                self._groups.append(_Group(self, part, inner))
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)

    def close(self) -> None:
        self._groups, self.count = [], 0  # a wrapper that follows sets its own groups

    @torch.no_grad()
    def reduce(self) -> None:
        for group in self._groups:
            group.reduce()
        self.count = 0

    @torch.no_grad()
    def norm(self) -> torch.Tensor:
        if self.count:
            self.reduce()
        shards = [local_of(p.grad) for p in self.module.parameters() if p.grad is not None]
        first = self._groups[0]
        return norm_of(shards, first.shards, first.inner.device)


class _Group:
    """Replaces the reduce-scatter of one parameter group. Has the methods of FSDP2's `ReduceScatter`."""

    def __init__(self, owner: Sharded, part: Any, inner: Any) -> None:
        self.inner = inner
        self._owner = owner
        self._sum: Sum | None = None
        self._given: torch.Tensor | None = None
        """The tensor that FSDP2 uses as gradients, from the step's first backward pass on."""
        self._scattered, self._rounds = False, 0
        mesh = inner.mesh_info
        if not hasattr(mesh, "shard_process_group") or inner.fsdp_params[0].sharded_param.device_mesh.ndim > (
            2 if self._is_hybrid else 1
        ):
            raise JobFailedError(
                "reproducible: a module that is neither FSDP2 nor HSDP, or tensor-parallel besides",
                hint="Meshes of one dimension (shard) and of two (replicate, shard) can be summed.",
            )
        if self._is_hybrid and mesh.shard_mesh_size == 1 and mesh.replicate_mesh_size > 1:
            raise JobFailedError(
                "reproducible: HSDP with one shard", hint="Use data_parallel without fully_shard, or several shards."
            )
        part.set_custom_reduce_scatter(self)
        part.set_all_reduce_hook(self._after)

    @property
    def shards(self) -> dist.ProcessGroup:
        """Group of the ranks that have one shard each. Not cached, because a fault replaces groups."""
        group: dist.ProcessGroup = self.inner.mesh_info.shard_process_group
        return group

    @property
    def _is_hybrid(self) -> bool:
        return hasattr(self.inner.mesh_info, "replicate_process_group")

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._add(input_tensor, output_tensor, group)
        self._scattered = True

    def _after(self, output: torch.Tensor) -> None:
        """Called after each reduction. With a single rank, called instead of it."""
        if not self._scattered:
            self._add(output, output, None)
        self._scattered = False

    def _add(self, gradients: torch.Tensor, output: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        """Add one micro-batch of each rank. `gradients`: flat, one part per rank. `output`: flat, the result for
        FSDP2."""
        groups = [] if group is None else [group]
        if group is not None and self._is_hybrid:
            groups.append(self.inner.mesh_info.replicate_process_group)
        self._check(output)
        self._rounds += 1
        ranks = 1
        top = torch.tensor([bin_of(*largest_of([gradients]))], dtype=torch.int32, device=gradients.device)
        for each in groups:
            dist.all_reduce(top, dist.ReduceOp.MAX, each)
            ranks *= each.size()
        self._owner._counted(self._rounds * ranks)
        if self._sum is None:
            self._sum = Sum(output.numel(), output.device)
        self._sum.raise_to(int(top.item()))
        if self._sum.top != BAD:
            self._sum.bins += self._scatter(gradients, groups)
        output.zero_()
        if self._given is None:
            self._given = output
        self._owner.count = max(self._owner.count, self._rounds)

    def _scatter(self, gradients: torch.Tensor, groups: list[dist.ProcessGroup]) -> torch.Tensor:
        """Return the bins of this rank's shard, summed over all ranks, as int32 (3, n)."""
        assert self._sum is not None
        parts = groups[0].size() if groups else 1
        bins = torch.zeros(parts, *self._sum.bins.shape, dtype=torch.int32, device=gradients.device)
        for own, part in zip(bins, gradients.view(parts, -1), strict=True):
            add_bins(part, self._sum.top, own)
        if not groups:
            return bins[0]
        mine = torch.empty_like(bins[0])
        _reduce_scatter(mine.view(-1), bins.view(-1), dist.ReduceOp.SUM, groups[0])
        for each in groups[1:]:
            dist.all_reduce(mine, dist.ReduceOp.SUM, each)
        return mine

    def _check(self, output: torch.Tensor) -> None:
        if self._given is None and any(p.sharded_param.grad is not None for p in self.inner.fsdp_params):
            raise stale()
        if self._given is not None and self._given.shape != output.shape:
            raise JobFailedError(
                "reproducible: backward passes of one step gave gradients to different parameters",
                hint="Have each micro-batch use the same parameters, or call set_reduce_scatter_unused_params(True).",
            )

    def reduce(self) -> None:
        if self._given is None or self._sum is None:
            return
        own = self._given.untyped_storage().data_ptr()
        for held in self.inner.fsdp_params:
            gradient = held.sharded_param.grad
            if gradient is not None and local_of(gradient).untyped_storage().data_ptr() != own and gradient.numel():
                raise JobFailedError(
                    "reproducible: FSDP2 keeps gradients elsewhere than it was given them",
                    hint="Leave out CPU offloading, and reduce in the type of the parameters: "
                    "MixedPrecisionPolicy(reduce_dtype=torch.float32) for float32 parameters.",
                )
        self._given.copy_(value_of(self._sum.packed(), self._sum.top))
        self._sum.clear()
        self._given, self._rounds = None, 0


def _state(part: FSDPModule) -> Any:
    return part._get_fsdp_state()


def norm_of(shards: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """Return the 2-norm, in float32, of float tensors that have a part on each rank of `group`. All its ranks must call
    this.

    Squares of float32 are exact in float64. Squares are added as integers of 62 - ceil(log2(count)) bits, so that even
    `count` of the largest squares stay below 2^62. NaN if a number is not finite.
    """
    squares = [shard.to(torch.float64).square() for shard in shards if shard.numel()]
    zero = torch.zeros((), dtype=torch.float64, device=device)
    highest = torch.stack([zero, *(square.max() for square in squares)]).max()
    finite = torch.isfinite(highest)
    largest = torch.where(finite, highest, math.inf)  # backends differ in how they order NaN
    count = torch.tensor(sum(square.numel() for square in squares), dtype=torch.int64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    dist.all_reduce(count, dist.ReduceOp.SUM, group)
    most = largest.item()
    if not math.isfinite(most):
        return torch.tensor(math.nan, device=device)
    if most == 0:
        return torch.tensor(0.0, device=device)
    bits = 62 - math.ceil(math.log2(int(count)))
    scale = math.ldexp(1.0, bits - math.frexp(most)[1])
    total = torch.zeros((), dtype=torch.int64, device=device)
    for square in squares:
        total += (square * scale).to(torch.int64).sum()
    dist.all_reduce(total, dist.ReduceOp.SUM, group)
    return (total.to(torch.float64) / scale).sqrt().to(torch.float32)
