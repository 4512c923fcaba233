"""A model in shards (FSDP2), moved: docs/move-your-script.md says what has changed."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hyperpod_ext.runtime import Run, resilient


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.outer(torch.relu(self.inner(self.norm(x)))))


def batch() -> torch.Tensor:
    return torch.randn(args.batch_size, args.width, device=args.device)


def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    model = nn.Sequential(*[Block(args.width) for _ in range(3)], nn.Linear(args.width, args.width)).to(args.device)
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    return model, optimizer, scheduler


@resilient
def main(run: Run) -> None:
    model, optimizer, scheduler = run.keep(build)
    for step in run.steps(args.steps, **locals()):
        x = batch()
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if run.rank == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    main()
