"""E5: a rank of four dies under DDP and FSDP2 on a 2x2 mesh. Survivors abort their groups all at once, and, in a
second run, one after the other; then they go on as three. The groups are those of a job that does not reconfigure
them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lane import Lane
from rank import Rank
from rank_processes import RankProcesses
from results import FailedError, Figure, Figures
from sums import add_up
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hyperpod_ext.runtime.process_group.nccl.environment import without_reconfigure

_MOST_S = 5.0
_LIMIT_S = 40.0
_SURVIVORS = [0, 1, 2]


def run(lane: Lane) -> Figures:
    at_once = _abort(lane, one_by_one=False)
    aborted_s = at_once["all at once: abort"].value
    if not lane.fake and isinstance(aborted_s, float) and aborted_s >= _MOST_S:
        raise FailedError(f"the abort took {aborted_s:.1f} s", at_once)
    try:
        return at_once | _abort(lane, one_by_one=True)
    except TimeoutError as error:
        return at_once | {"one by one: abort": Figure(f"did not return: {error}")}


def _abort(lane: Lane, *, one_by_one: bool) -> Figures:
    with RankProcesses(lane, "parallel_abort:body", 4, one_by_one=one_by_one) as ranks:
        ranks.until("running", 60.0 * lane.patience)
        ranks.kill(3)
        told = ranks.tell("abort")
        aborted = ranks.until("aborted", _LIMIT_S * lane.patience, _SURVIVORS)
        free = ranks.until("free", _LIMIT_S * lane.patience, _SURVIVORS)
        closed = ranks.until("closed", _LIMIT_S * lane.patience, _SURVIVORS)
        summed = ranks.until("summed", _LIMIT_S * lane.patience, _SURVIVORS)
    assert all(one["right"] for one in summed.values()), "sums of the new group are wrong"
    name = "one by one" if one_by_one else "all at once"
    return {
        f"{name}: abort": Figure(max(one["seconds"] for one in aborted.values()), "s"),
        f"{name}: main thread free": Figure(max(one["t"] for one in free.values()) - told, "s"),
        f"{name}: groups destroyed in": Figure(max(one["seconds"] for one in closed.values()), "s"),
        f"{name}: first sum as three": Figure(max(one["t"] for one in summed.values()) - told, "s"),
    }


def body(rank: Rank) -> None:
    rank.one_by_one = rank.options["one_by_one"]
    backend = "" if rank.lane.fake else without_reconfigure(torch.__version__, {})
    rank.open(backend=backend)
    step = _training(rank)
    rank.repeat(step)
    del step
    rank.synchronize()
    rank.report("closed", seconds=rank.close())
    rank.open(1, world_size=3, backend=backend)
    rank.report("summed", right=add_up(rank, 1 << 10))
    rank.close()


def _training(rank: Rank) -> Callable[[], object]:
    """A step of a module under DDP and of one in shards, each on two ranks: groups of all, of rows and of columns."""
    mesh = init_device_mesh(rank.lane.device, (2, 2), mesh_dim_names=("replicate", "shard"))
    replicated = DistributedDataParallel(_module(rank))
    sharded = _module(rank)
    fully_shard(sharded, mesh=mesh)
    optimizers = [torch.optim.SGD(module.parameters(), lr=1e-3) for module in (replicated, sharded)]

    def step() -> None:
        batch = torch.ones(8, 256, device=rank.device)
        (replicated(batch).square().mean() + sharded(batch).square().mean()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def _module(rank: Rank) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)).to(rank.device)
