"""What `continuing.py` times: each micro-batch takes a twelfth of four times HPX_BENCH_SECONDS, and ranks meet at the
end of a step, so that a rank which dies before takes the step of all others with it."""

import os
import time

import torch
from torch import nn

from hyperpod_ext.runtime import Run, resilient
from hyperpod_ext.runtime.data import ElasticDataLoader
from hyperpod_ext.runtime.reproducible import seeded

SECONDS, SLOTS = float(os.environ["HPX_BENCH_SECONDS"]), 12


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    fingerprint = "numbers"

    def __len__(self) -> int:
        return 2400

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(64.0).add(index).sin()


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@resilient
def train(run: Run) -> None:
    model, optimizer = run.keep(build)
    loader = ElasticDataLoader(Samples(), global_batch_size=2 * SLOTS, micro_batch_size=2)
    run.restore(model=model, optimizer=optimizer, data=loader)
    parallel = run.data_parallel(model, reproducible=True)
    for _, step in zip(run.steps(16), loader.steps(), strict=False):
        optimizer.zero_grad()
        for x, weight in seeded(step, run.config.seed):
            time.sleep(SECONDS * 4 / SLOTS)
            (parallel(x).square().mean() * weight).backward()
        parallel.reduce()
        optimizer.step()
        loader.ack(step)


train()
