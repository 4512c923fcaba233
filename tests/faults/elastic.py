"""A model whose number of ranks changes while it is trained; the global batch of a step is the same on any number.

HPX_TEST_PARALLEL is `ddp`, `fsdp2`, `hsdp` (two replicas where ranks are even), `mesh` (ddp, built beside a mesh) or
`norm` (ddp, with statistics that each rank has of its own). Each step takes HPX_TEST_SECONDS at least, until there is
a file `hurry`; from step HPX_TEST_SLOW_FROM on, ten times as long.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hyperpod_ext.runtime import Run, resilient

STEPS = int(os.environ.get("HPX_TEST_STEPS", "40"))
PARALLEL = os.environ.get("HPX_TEST_PARALLEL", "ddp")
SECONDS = float(os.environ.get("HPX_TEST_SECONDS", "0.05"))
SLOW_FROM = int(os.environ.get("HPX_TEST_SLOW_FROM", STEPS + 1))
HURRY = Path(os.environ["HPX_RUN_DIR"]) / "hurry"
WIDTH = int(os.environ.get("HPX_TEST_WIDTH", "37"))


def build(run: Run) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Sizes are no multiples of any number of ranks, so shards differ."""
    norm = nn.BatchNorm1d(WIDTH) if PARALLEL == "norm" else nn.LayerNorm(WIDTH)
    model = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), norm, nn.Linear(WIDTH, 5))
    if PARALLEL in ("fsdp2", "hsdp"):
        if PARALLEL == "hsdp" and run.world_size % 2 == 0:
            mesh = init_device_mesh("cpu", (2, run.world_size // 2), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh("cpu", (run.world_size,))
        for layer in (model[0], model[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if PARALLEL == "mesh":
        init_device_mesh("cpu", (run.world_size,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)


def batch(step: int, run: Run) -> torch.Tensor:
    """This rank's share of the global batch of a step."""
    whole = torch.randn(run.config.global_batch_size, 16, generator=torch.Generator().manual_seed(step))
    return whole[run.rank * run.batch_size : (run.rank + 1) * run.batch_size]


@resilient
def train(run: Run) -> None:
    model, optimizer, schedule = run.keep(lambda: build(run))
    run.restore(model=model, optimizer=optimizer, schedule=schedule)
    parallel = model if PARALLEL in ("fsdp2", "hsdp") else run.data_parallel(model)
    for step in run.steps(STEPS):
        began = time.monotonic()
        x = batch(step, run)
        loss = (parallel(x).sum(1) - x.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        mean = loss.detach() / run.world_size
        dist.all_reduce(mean)
        run.log(loss=mean, world=run.world_size)
        if not HURRY.exists():
            least = SECONDS * (10 if step >= SLOW_FROM else 1)
            time.sleep(max(0.0, least - (time.monotonic() - began)))


train()
