"""DDP as `run.data_parallel` makes it, without a run."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hyperpod_ext.runtime.state.ddp_buckets import Buckets, IncompleteDDP, complete


def wrap(module: torch.nn.Module, layout: Buckets | None, **options: Any) -> DistributedDataParallel:
    """Return `DistributedDataParallel(module, **options)` that has `layout` from its first step on. Collective."""
    ddp = IncompleteDDP(module, options)
    complete(ddp, layout)
    return ddp
