"""A training script whose weights are the same bits on any number of ranks, however often that changes."""

import os
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


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    fingerprint = "numbers"

    def __len__(self) -> int:
        return 101

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(16.0).add(index).sin()


@resilient
def train(run: Run) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(16, 37), nn.ReLU(), nn.Dropout(0.2), nn.LayerNorm(37), nn.Linear(37, 1))
        if PARALLEL == "fsdp2":
            fully_shard(model, mesh=init_device_mesh("cpu", (run.world_size,)))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = run.keep(build)
    loader = ElasticDataLoader(Samples(), global_batch_size=24, micro_batch_size=2)
    run.restore(model=model, optimizer=optimizer, data=loader)
    parallel = run.data_parallel(model, reproducible=True)
    for _, step in zip(run.steps(STEPS), loader.steps(), strict=False):
        began = time.monotonic()
        optimizer.zero_grad()
        total = torch.zeros(())
        for x, weight in seeded(step, run.config.seed):
            loss = (parallel(x).squeeze() - x.sum(1)).square().mean() * weight
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        loader.ack(step)
        run.log(loss=total, world=run.world_size)
        if not HURRY.exists():
            time.sleep(max(0.0, SECONDS - (time.monotonic() - began)))
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    bits = torch.cat([p.detach().flatten() for p in weights]).view(torch.int32).to(torch.int64)
    run.log(weights_low=int(bits.sum()), weights_high=int((bits * torch.arange(1, bits.numel() + 1)).sum() % 2**52))


train()
