"""A model in shards, with DCP's checkpoints replaced: docs/move-your-script.md says what has changed."""

import argparse

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from hyperpod_ext.runtime import Run, resilient


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    layers = [nn.Linear(args.width, args.width), nn.GELU(), nn.Linear(args.width, args.width)]
    model = nn.Sequential(*layers).to(args.device)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    return model, optimizer


@resilient
def main(run: Run) -> None:
    rank = run.rank
    model, optimizer = run.keep(build)
    for step in run.steps(args.steps, **locals()):
        torch.manual_seed(1000 * step + rank)
        x = torch.randn(args.batch_size, args.width, device=args.device)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 5 == 0:
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
