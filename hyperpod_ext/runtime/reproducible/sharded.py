"""Reproducible gradient sums for FSDP2 and HSDP.

Each backward pass reduce-scatters its gradients as int32 bins (integer sums, see `bins`), and each rank adds up the
bins of its own shards. During the step, FSDP2 gets zeros as gradients, as views of one flat tensor per parameter group.
`reduce` writes the sums into the flat tensors.
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

# older versions of torch have only `reduce_scatter_tensor`
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Sharded(Reproducible):
    """See `Reproducible`. The bins take 12 bytes of memory per parameter in this rank's shards."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self._groups: list[_Group] = []
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                raise JobFailedError(
                    f"reproducible: {name} belongs to no FSDP2 module, although other parameters do",
                    hint="Call fully_shard on the outermost module, too.",
                )
        for part in parts:
            for inner in _state(part)._fsdp_param_groups:
                self._groups.append(_Group(self, part, inner))
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)

    def close(self) -> None:
        self._groups, self.count = [], 0  # the next wrapper will replace the hooks of these groups

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
    """Replaces the reduce-scatter of one FSDP2 parameter group. Implements FSDP2's protocol `ReduceScatter`."""

    def __init__(self, owner: Sharded, part: Any, inner: Any) -> None:
        self.inner = inner
        self._owner = owner
        self._sum: Sum | None = None
        self._given: torch.Tensor | None = None
        """The flat tensor whose views FSDP2 uses as gradients, set in the step's first backward pass; None before."""
        self._scattered, self._rounds = False, 0
        mesh = inner.mesh_info
        if not hasattr(mesh, "shard_process_group") or inner.fsdp_params[0].sharded_param.device_mesh.ndim > (
            2 if self._is_hybrid else 1
        ):
            raise JobFailedError(
                "reproducible: a module uses neither FSDP2 nor HSDP, or also uses tensor parallelism",
                hint="Use a device mesh of one dimension (shard) or of two dimensions (replicate, shard).",
            )
        if self._is_hybrid and mesh.shard_mesh_size == 1 and mesh.replicate_mesh_size > 1:
            raise JobFailedError(
                "reproducible: HSDP with only one shard is not supported",
                hint="Use data_parallel without fully_shard, or use several shards.",
            )
        part.set_custom_reduce_scatter(self)
        part.set_all_reduce_hook(self._after)

    @property
    def shards(self) -> dist.ProcessGroup:
        """Process group over which the parameters are sharded. The process group is not cached, because a fault
        replaces process groups."""
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
        """Add the gradients if there is only one rank. FSDP2 calls this hook after each reduce-scatter; with one rank
        it makes no reduce-scatter, and calls only the hook.
        """
        if not self._scattered:
            self._add(output, output, None)
        self._scattered = False

    def _add(self, gradients: torch.Tensor, output: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        """Add the gradients of one micro-batch of each rank to this rank's sum. Collective.

        Args:
            gradients: flat gradients of this rank's micro-batch, with one part per rank of `group`.
            output: flat tensor in which FSDP2 expects this rank's reduced gradients, and which is set to zero.
            group: process group over which the parameters are sharded; None if there is only one rank.
        """
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
        """Return the bins of this rank's shard, summed over all ranks, as an int32 tensor of shape (3, n)."""
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
                "reproducible: backward passes of one step computed gradients of different parameters",
                hint="Use the same parameters in each micro-batch, or call set_reduce_scatter_unused_params(True).",
            )

    def reduce(self) -> None:
        if self._given is None or self._sum is None:
            return
        own = self._given.untyped_storage().data_ptr()
        for held in self.inner.fsdp_params:
            gradient = held.sharded_param.grad
            if gradient is not None and local_of(gradient).untyped_storage().data_ptr() != own and gradient.numel():
                raise JobFailedError(
                    "reproducible: FSDP2 has copied its gradients, so the exact sums cannot be written into them",
                    hint="Do not offload to the CPU, and reduce in the type of the parameters: for float32 parameters, "
                    "use MixedPrecisionPolicy(reduce_dtype=torch.float32).",
                )
        self._given.copy_(value_of(self._sum.packed(), self._sum.top))
        self._sum.clear()
        self._given, self._rounds = None, 0


def _state(part: FSDPModule) -> Any:
    return part._get_fsdp_state()


def norm_of(shards: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """Return the 2-norm, in float32, of float tensors that are sharded over the ranks of `group`. Collective.

    The norm has the same bits for any number of ranks. The square of a float32 number is exact in float64. Squares are
    added as integers of 62 - ceil(log2(count)) bits, so that the sum of `count` squares always stays below 2^62.

    Args:
        shards: this rank's shards.
        group: all ranks of this process group must call the function.
        device: the device of the result and of the collectives.

    Returns:
        The norm; NaN if a number on any rank is not finite.
    """
    squares = [shard.to(torch.float64).square() for shard in shards if shard.numel()]
    zero = torch.zeros((), dtype=torch.float64, device=device)
    highest = torch.stack([zero, *(square.max() for square in squares)]).max()
    finite = torch.isfinite(highest)
    largest = torch.where(finite, highest, math.inf)  # avoid NaN, whose maximum differs between backends
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
