"""The same training under NVRx's in-process restart, as its example for CPUs has it.

The wrapped function is called again after a fault; model and optimizer are made once a process, and their state comes
from the newest DCP checkpoint. One process more than there are ranks waits in reserve. Each process writes its
moments to `process<P>.jsonl`; what follows a `called` is of the rank and the iteration that it names.
"""

# no `from __future__ import annotations` here: the wrapper finds its argument by the annotation
import datetime
import os
from typing import Any, Optional

import nvidia_resiliency_ext.inprocess as inprocess
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.rank_assignment import FillGaps, MaxActiveWorldSize
from recovery_training import Checkpoints, Stamps, Training, parse
from torch.nn.parallel import DistributedDataParallel


def train(
    args: Any,
    stamps: Stamps,
    store: dist.Store,
    training: Training,
    model: Any,
    optimizer: Any,
    call_wrapper: Optional[inprocess.CallWrapper] = None,  # noqa: UP045
) -> None:
    assert call_wrapper is not None
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stamps.write("called", rank=rank, iteration=call_wrapper.iteration)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(call_wrapper.iteration), store),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=args.gloo_timeout),
        )
        stamps.write("group_up")
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
    except BaseException as error:  # the wrapper interrupts the function with one
        stamps.write("exception", error=type(error).__name__)
        raise


def main() -> None:
    args = parse(__doc__, ranks=4, gloo_timeout=10.0)
    process, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    stamps = Stamps(args.folder / f"process{process}.jsonl")
    stamps.write("started", pid=os.getpid())
    training = Training(args)
    model, optimizer = training.build()
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], port + 1, int(os.environ["WORLD_SIZE"]), is_master=process == 0, multi_tenant=True
    )
    wrapper = inprocess.Wrapper(
        store_kwargs={"port": port + 2},
        rank_assignment=inprocess.Compose(MaxActiveWorldSize(args.ranks), FillGaps()),
    )
    wrapper(train)(args, stamps, store, training, model, optimizer)


if __name__ == "__main__":
    main()
