"""Rank and world size of this process, as of now."""

from __future__ import annotations

import os
import sys

from hyperpod_ext.errors import JobFailedError

_full_size: int | None = None


def share_of(ranks: int | None) -> None:
    """A step has as many of its micro-batches as this world is of `ranks`; None: all of them."""
    global _full_size
    _full_size = ranks


def part_of(slots: int) -> int:
    """How many of a step's micro-batches are made: one at least."""
    return slots if _full_size is None else max(1, slots * min(world_of_this_process()[1], _full_size) // _full_size)


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
