"""E1: ranks that share one GPU make an all-reduce, and its sums are right."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from lane import Lane
from rank import Rank
from rank_processes import RankProcesses
from results import Figure, Figures

_ELEMENTS = {"cuda": 16 << 20, "cpu": 1 << 16}
_ROUNDS = 10


def run(lane: Lane) -> Figures:
    with RankProcesses(lane, "sums:body", 4) as ranks:
        found = ranks.until("summed", 90.0 * lane.patience).values()
        ranks.end()
    assert all(one["right"] for one in found), "an all-reduce gave wrong sums"
    size = _ELEMENTS[lane.device] * 4 / 2**20
    return {
        "4 ranks, from nothing to the first sum": Figure(max(one["first_s"] for one in found), "s"),
        f"4 ranks, all-reduce of {size:g} MiB": Figure(max(one["each_s"] for one in found) * 1e3, "ms"),
    }


def body(rank: Rank) -> None:
    began = time.monotonic()
    rank.open()
    right = [add_up(rank, 1 << 10)]
    first_s, began = time.monotonic() - began, time.monotonic()
    right += [add_up(rank, _ELEMENTS[rank.lane.device]) for _ in range(_ROUNDS)]
    each_s = (time.monotonic() - began) / _ROUNDS
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    right.append(add_up(rank, 1 << 10, pairs[rank.rank // 2]))
    rank.report("summed", right=all(right), first_s=first_s, each_s=each_s)
    rank.close()


def add_up(rank: Rank, elements: int, group: dist.ProcessGroup | None = None) -> bool:
    """Whether an all-reduce of each rank's number gives their sum."""
    tensor = torch.full((elements,), float(dist.get_rank(group) + 1), device=rank.device)
    dist.all_reduce(tensor, group=group)
    rank.synchronize()
    size = dist.get_world_size(group)
    return bool((tensor == size * (size + 1) / 2).all())
