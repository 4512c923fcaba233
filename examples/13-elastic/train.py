"""A job that goes on with more or fewer nodes while it trains. The samples of a step are the same on any number.

hp-ext create-job -f job.yaml --target local
hp-ext resize elastic --nodes 3
hp-ext resize elastic --nodes 1
hp-ext wait elastic
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hyperpod_ext.runtime import Run, resilient


def share(run: Run, step: int) -> torch.Tensor:
    """This rank's part of the step's global batch: chosen by the step, cut by the ranks that there are now."""
    samples = torch.randn(args.batch, 64, generator=torch.Generator().manual_seed(step))
    return samples[run.rank * run.batch_size :][: run.batch_size]


@resilient
def train(run: Run) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(64, args.width), nn.GELU(), nn.Linear(args.width, 64))
        if (
            args.shards
        ):  # built anew when the number of ranks changes; its state is cut anew from what the old ones held
            fully_shard(model, mesh=init_device_mesh("cpu", (run.world_size,)))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, optimizer = run.keep(build)
    run.restore(model=model, optimizer=optimizer)
    parallel = model if args.shards else run.data_parallel(model)
    for step in run.steps(args.steps):
        x = share(run, step)
        loss = (parallel(x) - x.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / run.world_size
        dist.all_reduce(mean)
        run.log(loss=mean)
        time.sleep(args.seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=48, help="samples of a step, over all ranks")
    parser.add_argument("--width", type=int, default=256, help="width of the model")
    parser.add_argument("--shards", action="store_true", help="FSDP2 instead of DDP")
    parser.add_argument(
        "--seconds", type=float, default=0.1, help="rest after each step, so that there is time to look"
    )
    args = parser.parse_args()
    train()
