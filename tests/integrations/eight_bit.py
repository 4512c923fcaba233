"""A training script with an optimizer whose moments are of 8 bits: of `bitsandbytes`, or of `torchao`."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

from hyperpod_ext.runtime import Run, resilient


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    if args.optimizer == "torchao":
        from torchao.optim import AdamW8bit

        return AdamW8bit(model.parameters(), lr=1e-2)
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=1)


@resilient
def train(run: Run) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.1), nn.ReLU(), nn.Linear(128, 1))
        return model, optimizer_of(model)

    model, optimizer = run.keep(build)
    run.restore(model=model, optimizer=optimizer)
    parallel = run.data_parallel(model)
    for _ in run.steps(16):
        given = torch.randn(run.batch_size, 64)
        loss = (parallel(given) - given.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        mean = loss.detach() / run.world_size
        dist.all_reduce(mean)
        optimizer.step()
        run.log(loss=mean)


parser = argparse.ArgumentParser()
parser.add_argument("optimizer", choices=["bitsandbytes", "torchao"])
args = parser.parse_args()
train()
