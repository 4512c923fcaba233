"""The same training under torchft, a replica group for each rank, as its example for DDP has it.

The survivors discard the step, and go on without the dead rank; its torchrun starts it again, and it takes their
state. Each process writes its moments to `rank<R>.attempt<A>.jsonl`. A step's end says how many took part in it.
"""

# ruff: noqa: E402  (the clock comes before the imports, which are what it measures)
import time

STARTED = time.monotonic()

import os
from datetime import timedelta
from typing import Any

import torch
from recovery_training import Stamps, Training, parse
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

IMPORTED = time.monotonic()

WHOLE_STEPS = 3
"""Steps that all ranks have made together, after the last one that they have not, before the job ends."""


class Parallel(DistributedDataParallel):
    """Torchft's, but for its hook, which in 0.2.0 asserts a future that is not there when an all-reduce on the CPU has
    failed, and so ends the survivors."""

    @staticmethod
    def _comm_hook(state: Manager, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.allreduce(bucket.buffer()).wait()  # a failure is noted by the manager
        averaged: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        averaged.set_result(bucket.buffer())
        return averaged


def main() -> None:
    args = parse(__doc__, ranks=4)
    rank, attempt = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    stamps = Stamps(args.folder / f"rank{rank}.attempt{attempt}.jsonl")
    stamps.write("started", t=STARTED, pid=os.getpid())
    stamps.write("imported", t=IMPORTED)
    training = Training(args)
    model, adamw = training.build()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adamw.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": adamw.state_dict()},
        replica_id=f"rank{rank}",
        timeout=timedelta(seconds=30),
        hostname="127.0.0.1",
        init_sync=False,  # all ranks are built alike
    )
    parallel, optimizer = Parallel(manager, model), Optimizer(manager, adamw)
    stamps.write("built")
    _wait_for_all(args)

    whole = 0
    while manager.current_step() < args.steps or whole < WHOLE_STEPS:
        made = manager.current_step()
        stamps.write("step_begin", step=made + 1)
        optimizer.zero_grad()  # the quorum begins here
        loss = training.loss(parallel, made + 1, rank)
        loss.backward()
        mean = loss.detach().clone()
        manager.allreduce(mean).wait()
        optimizer.step()
        step, took_part = manager.current_step(), manager.num_participants()
        if step > made:
            whole = whole + 1 if took_part == args.ranks else 0
            stamps.write("step_end", step=step, loss=float(mean), ranks=took_part)
        else:
            stamps.write("discarded", step=made + 1)
    stamps.write("done", held_out_loss=training.held_out_loss(model))
    manager.shutdown()


def _wait_for_all(args: Any) -> None:
    """The first steps are to be made by all ranks; whoever is started again later finds them all there."""
    built = '"event": "built"'
    while sum(built in file.read_text() for file in args.folder.glob("rank*.attempt0.jsonl")) < args.ranks:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
