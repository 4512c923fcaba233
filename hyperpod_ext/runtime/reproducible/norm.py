"""A norm of shards that is the same for any way of cutting them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist


def norm_of(shards: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """2-norm of float tensors of which each rank of `group` has a part; a float32 number. Collective.

    Squares of float32 are exact in float64. They are added as integers of 62 - ceil(log2(count)) bits, so that `count`
    of the largest stay below 2^62. NaN where something is not finite.
    """
    squares = [shard.to(torch.float64).square() for shard in shards if shard.numel()]
    zero = torch.zeros((), dtype=torch.float64, device=device)
    highest = torch.stack([zero, *(square.max() for square in squares)]).max()
    finite = torch.isfinite(highest)
    largest = torch.where(finite, highest, math.inf)  # backends differ in what is larger than NaN
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
