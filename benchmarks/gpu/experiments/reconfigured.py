"""E3: groups of torch's `nccl2` are reconfigured after a kill: survivors keep their group's object, and a new
process takes the dead rank's place. The ranks meet in the product's own store class. Once more with NCCL's shrink
and grow."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lane import Lane
from rank import Rank
from rank_processes import RankProcesses
from results import Figure, Figures, NotRunError
from sums import add_up

from hyperpod_ext.runtime.process_group.store import LastingStore

_dist: Any = dist
"""Older torch has no reconfigure, and so no types of it."""
_SHRINK = "TORCH_NCCL2_RECONFIGURE_SHRINK_GROW"


def run(lane: Lane) -> Figures:
    if not hasattr(_dist, "_reconfigure") or not (lane.fake or lane.engine == "nccl2"):
        raise NotRunError(f"torch {torch.__version__} has no reconfigure: 2.15 has")
    anew = _reconfigure(lane, {}, "made again")
    return anew if lane.fake else anew | _reconfigure(lane, {_SHRINK: "1"}, "by shrink and grow")


def _reconfigure(lane: Lane, more: dict[str, str], name: str) -> Figures:
    with RankProcesses(lane, "reconfigured:body", 3, more=more, generation=0) as ranks:
        ranks.until("running", 60.0 * lane.patience)
        ranks.kill(2)
        told = ranks.tell("abort")
        ranks.start(2, generation=1)
        summed = ranks.until("summed", 60.0 * lane.patience)
        ranks.end()
    assert all(one["right"] for one in summed.values()), "sums after the reconfigure are wrong"
    assert all(summed[rank]["same_group"] for rank in (0, 1)), "survivors have another group object"
    return {f"{name}: abort to the first sum": Figure(max(one["t"] for one in summed.values()) - told, "s")}


def open_group(rank: Rank, generation: int) -> None:
    """Open the default group as one that can be reconfigured, with the ranks of this generation."""
    store = rank.kept = LastingStore()
    store.become(rank.store)
    _dist.init_process_group(
        rank.lane.backend,
        store=store,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=100),
        enable_reconfigure=True,
    )
    _meet(rank, generation)


def body(rank: Rank) -> None:
    generation = rank.options["generation"]
    open_group(rank, generation)
    group = dist.group.WORLD
    if generation == 0:
        rank.repeat(lambda: add_up(rank, 1 << 14))
        rank.synchronize()
        _meet(rank, 1)
    rank.report("summed", right=add_up(rank, 1 << 14), same_group=group is dist.group.WORLD)
    rank.close()


def _meet(rank: Rank, generation: int) -> None:
    """Give the group the ranks of this generation."""
    rank.store.set(f"handle/{generation}/{rank.rank}", _dist._get_reconfigure_handle(dist.group.WORLD))
    handles = [rank.store.get(f"handle/{generation}/{other}").decode() for other in range(rank.world_size)]
    _dist._reconfigure(uuid=generation + 1, handles=handles, group=dist.group.WORLD).wait()
