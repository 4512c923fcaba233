"""A model in shards: FSDP2 over all ranks, or HSDP, where every shard is on two ranks or more.

Survivors of a fault keep model, optimizer and meshes; process groups are made again behind them. With HSDP the shard
of a dead rank comes live from its copy, and not even a save every step is needed; with FSDP2, from memory.

    hp-ext create-job -f job.yaml --target local --wait
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hyperpod_ext.runtime import Run, resilient


class Block(nn.Module):
    """A small network whose output is added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.mlp(x))


@resilient
def train(run: Run) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        blocks = [Block(args.width) for _ in range(args.layers)]
        model = nn.Sequential(nn.Linear(64, args.width), *blocks, nn.Linear(args.width, 64)).to(args.device)
        shape = (args.replicas, run.world_size // args.replicas)
        mesh = init_device_mesh(args.device, shape, mesh_dim_names=("replicate", "shard"))
        for block in blocks:
            fully_shard(block, mesh=mesh if args.replicas > 1 else mesh["shard"])
        fully_shard(model, mesh=mesh if args.replicas > 1 else mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    model, optimizer, schedule = run.keep(build)
    run.restore(model=model, optimizer=optimizer, schedule=schedule)
    for _ in run.steps(args.steps):
        x = torch.randn(run.batch_size, 64).to(args.device)
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        mean = loss.detach() / run.world_size
        dist.all_reduce(mean)
        run.log(loss=mean)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--width", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model")
    parser.add_argument("--device", default="cpu", help="where the model is: cpu, or cuda")
    parser.add_argument("--replicas", type=int, default=2, help="copies of each shard; 1: plain FSDP2")
    args = parser.parse_args()
    train()
