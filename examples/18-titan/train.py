"""A loop in TorchTitan's manner: a trainer that counts its steps, and a checkpointer that it calls load and save of.

FSDP2, and no TorchTitan needed.

    hp-ext create-job -f job.yaml --target local --wait
"""

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hyperpod_ext.integrations.titan import RunCheckpointer
from hyperpod_ext.runtime import Run, resilient
from hyperpod_ext.runtime.data import ElasticDataLoader


class Turned(torch.utils.data.Dataset):
    """Random vectors, and the same turned by one place."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return x, x.roll(1)


class Trainer:
    """What TorchTitan's class of this name does, in small."""

    def __init__(self, run: Run, steps: int) -> None:
        self.run, self.steps, self.step = run, steps, 0
        self.dataloader = ElasticDataLoader(
            Turned(), global_batch_size=32, micro_batch_size=8, rank=run.rank, world_size=run.world_size
        )
        self.model, self.optimizer, self.schedule = run.keep(self.build)
        self.checkpointer = RunCheckpointer(
            run,
            total=steps,
            model=self.model,
            optimizers=self.optimizer,
            lr_schedulers=self.schedule,
            dataloader=self.dataloader,
        )

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
        mesh = init_device_mesh("cpu", (self.run.world_size,), mesh_dim_names=("dp_shard",))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)

    def train_step(self, data: Iterator) -> None:
        self.optimizer.zero_grad()
        step, total = next(data), torch.zeros(())
        for (x, y), weight in step:
            loss = (self.model(x) - y).square().mean() * weight
            (loss * self.run.world_size).backward()
            total += loss.detach()
        self.optimizer.step()
        self.schedule.step()
        self.dataloader.ack(step)
        dist.all_reduce(total)
        self.run.log(loss=total)

    def train(self) -> None:
        with self.checkpointer:
            self.step = self.checkpointer.load()
            data = self.dataloader.steps()
            while self.step < self.steps:
                self.step += 1
                self.train_step(data)
                self.checkpointer.save(self.step, last_step=self.step == self.steps)


@resilient
def train(run: Run) -> None:
    Trainer(run, args.steps).train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    args = parser.parse_args()
    train()
