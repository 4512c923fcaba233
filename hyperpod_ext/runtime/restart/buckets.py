"""DDP whose gradient buckets keep their layout through a fault, so that sums keep their order.

DDP rebuilds its buckets after the first backward, in the order gradients arrived. A ring all-reduce
adds each element's contributions in an order that depends on where in a bucket it lies. A new DDP
after a fault would start from the first layout again, and its losses would differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hyperpod_ext.errors import JobFailedError

Buckets = list[list[int]]
"""Parameter indices of each bucket, in the order buckets are reduced."""


def wrap(module: torch.nn.Module, layout: Buckets | None, **options: Any) -> DistributedDataParallel:
    """`DistributedDataParallel(module, **options)`, with buckets of `layout` from the first step on."""
    if layout is None:
        return DistributedDataParallel(module, **options)
    with _pinned(layout):
        return DistributedDataParallel(module, **options)


def layout_of(ddp: DistributedDataParallel) -> Buckets | None:
    """The layout that `ddp` uses from its next step on; collective, call it after a step on every rank.

    None where DDP never rebuilds (unused parameters are looked for): then every layout is the first one.
    """
    ddp.reducer._rebuild_buckets()  # what the next forward would do first
    logged: Any = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    text = logged.get("rebuilt_per_bucket_param_indices")
    return parse(str(text)) if text else None


def parse(text: str) -> Buckets:
    """Read DDP's `"22 23, 19 18 16"`."""
    return [[int(index) for index in bucket.split()] for bucket in text.split(",")]


@contextmanager
def _pinned(layout: Buckets) -> Iterator[None]:
    """Within the block, DDP's first assignment of parameters to buckets is `layout`.

    torch has no public way to say this; the function below is the one place DDP asks.
    """
    torch_dist: Any = dist
    assign = torch_dist._compute_bucket_assignment_by_size

    def pinned(parameters: Sequence[torch.Tensor], limits: Sequence[int], *_rest: Any) -> tuple[Buckets, list[int]]:
        if sorted(index for bucket in layout for index in bucket) != list(range(len(parameters))):
            raise JobFailedError(
                f"data_parallel: the module has {len(parameters)} trained parameters; before the fault it had "
                f"{sum(map(len, layout))}",
                hint="Call run.data_parallel for the same modules in the same order each time.",
            )
        return layout[::-1], [max(limits)] * len(layout)  # DDP reverses them again

    torch_dist._compute_bucket_assignment_by_size = pinned
    try:
        yield
    finally:
        torch_dist._compute_bucket_assignment_by_size = assign
