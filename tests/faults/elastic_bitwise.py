"""A training script whose losses and weights are the same bits on any number of ranks, however often that changes.

HPX_TEST_PARALLEL is `ddp`, `fsdp2` or `hsdp` (two replicas where there are four ranks). Each step takes
HPX_TEST_SECONDS at least, until there is a file `hurry`. With HPX_TEST_HEAR_AT, `2@60`, two ranks wait for SIGUSR1 in
step 60; in a step that is none, after the last.
"""

import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hyperpod_ext.runtime import Run, resilient
from hyperpod_ext.runtime.data import ElasticDataLoader
from hyperpod_ext.runtime.reproducible import seeded

STEPS = int(os.environ.get("HPX_TEST_STEPS", "60"))
PARALLEL = os.environ.get("HPX_TEST_PARALLEL", "ddp")
SECONDS = float(os.environ.get("HPX_TEST_SECONDS", "0.1"))
HURRY = Path(os.environ["HPX_RUN_DIR"]) / "hurry"
HEAR_AT = os.environ.get("HPX_TEST_HEAR_AT", "")
MICRO_BATCHES = 12

heard = threading.Event()
if HEAR_AT:
    signal.signal(signal.SIGUSR1, lambda signum, frame: heard.set())


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    fingerprint = "numbers"

    def __len__(self) -> int:
        return 101

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(16.0).add(index).sin()


def hear(run: Run, step: int) -> None:
    """Wait for the signal that an agent sends before it starts the job with other nodes, if this is where it comes."""
    if f"{run.world_size}@{step}" == HEAR_AT:
        heard.wait()


def build(run: Run) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(16, 37), nn.ReLU(), nn.Dropout(0.2), nn.LayerNorm(37), nn.Linear(37, 1))
    if PARALLEL in ("fsdp2", "hsdp"):
        mesh = init_device_mesh("cpu", (run.world_size,))
        if PARALLEL == "hsdp" and run.world_size == 4:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@resilient
def train(run: Run) -> None:
    model, optimizer = run.keep(lambda: build(run))
    loader = ElasticDataLoader(Samples(), global_batch_size=2 * MICRO_BATCHES, micro_batch_size=2)
    run.restore(model=model, optimizer=optimizer, data=loader)
    parallel = run.data_parallel(model, reproducible=True)
    for _, step in zip(run.steps(STEPS), loader.steps(), strict=False):
        began = time.monotonic()
        optimizer.zero_grad()
        losses = torch.zeros(MICRO_BATCHES)  # each is one rank's, so that no sum of two depends on ranks
        for slot, (x, weight) in zip(step.slots, seeded(step, run.config.seed), strict=True):
            loss = (parallel(x).squeeze() - x.sum(1)).square().mean() * weight
            loss.backward()
            if weight:
                losses[slot.index] = loss.detach()
        dist.all_reduce(losses)
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        loader.ack(step)
        run.log(loss=losses.sum(), world=run.world_size)
        hear(run, step.number)
        if not HURRY.exists():
            time.sleep(max(0.0, SECONDS - (time.monotonic() - began)))
    hear(run, STEPS + 1)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    bits = torch.cat([p.detach().flatten() for p in weights]).view(torch.int32).to(torch.int64)
    run.log(weights_low=int(bits.sum()), weights_high=int((bits * torch.arange(1, bits.numel() + 1)).sum() % 2**52))


train()
