"""A loop over epochs with Accelerate and a shuffled DataLoader. Each rank records the samples of its batches."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hyperpod_ext.integrations.accelerate import ResilientAccelerator
from hyperpod_ext.runtime import Run, resilient


class Vectors(Dataset[tuple[int, torch.Tensor]]):
    """A number, and a random vector."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(8, generator=torch.Generator().manual_seed(index))


@resilient
def train(run: Run) -> None:
    accelerator = ResilientAccelerator(run, cpu=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader, held_out = DataLoader(Vectors(), batch_size=3, shuffle=True), DataLoader(Vectors(), batch_size=4)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    with Path(os.environ["SAMPLES"], f"samples-{run.rank}.jsonl").open("a") as samples:
        for epoch, batches in accelerator.epochs(loader, 4):
            for number, (ids, x) in enumerate(batches, batches.first):
                samples.write(json.dumps([epoch, number, run.rank, ids.tolist()]) + "\n")
                samples.flush()
                loss = (model(x) - x.roll(1, dims=1)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=accelerator.reduce(loss.detach(), "mean"))
            seen = [accelerator.gather_for_metrics(ids) for ids, _ in held_out]
            assert torch.cat(seen).sort().values.tolist() == list(range(24))


train()
