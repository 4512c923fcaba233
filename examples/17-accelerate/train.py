"""A small model learns a rotation with Accelerate: a loop of one's own, with its optimizer and schedule prepared.

hp-ext create-job -f job.yaml --target local --wait
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

from hyperpod_ext.integrations.accelerate import ResilientAccelerator
from hyperpod_ext.runtime import Run, resilient
from hyperpod_ext.runtime.data import ElasticDataLoader


class Turned(torch.utils.data.Dataset):
    """Random vectors, and the same turned by one place."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return x, x.roll(1)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@resilient
def train(run: Run) -> None:
    accelerator = ResilientAccelerator(run, cpu=not torch.cuda.is_available())
    loader = ElasticDataLoader(
        Turned(), global_batch_size=32, micro_batch_size=8, rank=run.rank, world_size=run.world_size
    )
    accelerator.register_for_checkpointing(loader)
    model, optimizer = run.keep(build)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

    for _, step in zip(run.steps(args.steps), loader.steps(), strict=False):
        total = torch.zeros((), device=accelerator.device)
        for (x, y), weight in step:
            loss = (model(x.to(accelerator.device)) - y.to(accelerator.device)).square().mean() * weight
            accelerator.backward(loss * run.world_size)
            total += loss.detach()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loader.ack(step)
        dist.all_reduce(total)
        run.log(loss=total)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    args = parser.parse_args()
    train()
