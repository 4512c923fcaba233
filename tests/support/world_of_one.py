"""A process group of this process alone, for what asks torch for one and needs no second rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from hyperpod_ext.runtime.process_group.gloo.waits import wait_until_idle


@contextmanager
def world_of_one() -> Iterator[dist.ProcessGroup]:
    """The default group, until the end of the block."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        wait_until_idle()  # or torch may hang for good
        dist.destroy_process_group()
