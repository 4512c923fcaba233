"""Rank and world size of this process, as of now."""

from __future__ import annotations

import os
import sys

from hyperpod_ext.errors import JobFailedError


def world_of_this_process() -> tuple[int, int]:
    """Rank and world size: of torch.distributed where it is in use, or else RANK and WORLD_SIZE, or else (0, 1)."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        raise JobFailedError(
            f"RANK={rank} and WORLD_SIZE={world_size} are no rank of a world", hint="Give rank and world_size."
        )
    return int(rank), int(world_size)
