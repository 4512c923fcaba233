"""The training of examples/01-local as torchrun's users write it: DDP on gloo or NCCL, DCP checkpoints in a directory.

Each process writes its moments to `rank<R>.attempt<A>.jsonl`.
"""

# ruff: noqa: E402  (the clock comes before the imports, which are what it measures)
import time

STARTED = time.monotonic()

import argparse
import os

import torch.distributed as dist
from recovery_training import Checkpoints, Stamps, Training, parse
from torch.nn.parallel import DistributedDataParallel

IMPORTED = time.monotonic()


def train(args: argparse.Namespace, stamps: Stamps, rank: int) -> None:
    training = Training(args)
    world_size = dist.get_world_size()
    model, optimizer = training.build()
    parallel = DistributedDataParallel(model)
    stamps.write("built")

    checkpoints = Checkpoints(args.folder / "checkpoints", parallel, optimizer)
    newest = checkpoints.load_newest()
    stamps.write("loaded", step=newest)

    for step in range(newest + 1, args.steps + 1):
        stamps.write("step_begin", step=step)
        loss = training.loss(parallel, step, rank)
        optimizer.zero_grad()
        loss.backward()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        optimizer.step()
        stamps.write("step_end", step=step, loss=float(mean))
        if step % args.save_every == 0:
            checkpoints.save(step)
    stamps.write("done", held_out_loss=training.held_out_loss(model))


def main() -> None:
    args = parse(__doc__)
    rank = int(os.environ["RANK"])
    stamps = Stamps(args.folder / f"rank{rank}.attempt{os.environ['TORCHELASTIC_RESTART_COUNT']}.jsonl")
    stamps.write("started", t=STARTED, pid=os.getpid())
    stamps.write("imported", t=IMPORTED)
    dist.init_process_group("gloo" if args.device == "cpu" else "nccl")
    stamps.write("group_up")
    try:
        train(args, stamps, rank)
    except Exception as error:
        stamps.write("exception", error=str(error).splitlines()[0])
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
