"""What the image of job.yaml holds in /workspace: a small network, on the GPU of its rank where there is one.

Rank 0 prints its loss: log_rules of job.yaml look for that, and `run.log` prints nothing.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

from hyperpod_ext.runtime import Run, resilient


@resilient
def train(run: Run) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, optimizer = run.keep(build)
    run.restore(model=model, optimizer=optimizer)
    parallel = run.data_parallel(model)
    for step in run.steps(args.steps):
        x = torch.randn(run.batch_size, 64).to(device)  # the random generators are set from step and rank
        loss = (parallel(x) - x.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / run.world_size
        dist.all_reduce(mean)
        run.log(loss=mean)
        if run.rank == 0 and step % 10 == 0:
            print(f"step {step}, loss {mean.item():.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    args = parser.parse_args()
    train()
