"""The present rank and world size of this process, and the share of a step to make while ranks are missing."""

from __future__ import annotations

import os
import sys

from hyperpod_ext.errors import JobFailedError

_full_size: int | None = None


def share_of(ranks: int | None) -> None:
    """Make later steps smaller, by the ratio of the present world size to `ranks`. If `ranks` is None, later steps have
    their full size again."""
    global _full_size
    _full_size = ranks


def part_of(slots: int) -> int:
    """Return how many of a step's `slots` micro-batches to make while ranks are missing; at least one."""
    return slots if _full_size is None else max(1, slots * min(world_of_this_process()[1], _full_size) // _full_size)


def world_of_this_process() -> tuple[int, int]:
    """Return (rank, world size): from torch.distributed if it is initialized, else RANK and WORLD_SIZE, else (0, 1)."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        raise JobFailedError(
            f"RANK={rank} and WORLD_SIZE={world_size} do not fit together", hint="Pass rank and world_size."
        )
    return int(rank), int(world_size)
