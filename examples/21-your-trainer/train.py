"""A script that uses the trainer of loop.py, with its adapter.

hp-ext create-job -f job.yaml --target local --wait
"""

import torch
from adapter import ResilientLoop
from loop import Hooks, Loop
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hyperpod_ext.runtime import Run, resilient


class Report(Hooks):
    def after_epoch(self, loop: Loop) -> None:
        print(f"epoch {loop.epoch}: the lowest loss so far is {loop.best}", flush=True)


@resilient
def train(run: Run) -> None:
    x = torch.randn(160, 16, generator=torch.Generator().manual_seed(0))
    samples = TensorDataset(x, x.roll(1, 1))
    batches = DataLoader(samples, batch_size=8, sampler=DistributedSampler(samples, run.world_size, run.rank))
    model = run.keep(lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16)))
    ResilientLoop(run, model, batches, epochs=3, hooks=[Report()]).train()


if __name__ == "__main__":
    train()
