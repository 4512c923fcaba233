"""A training script that stays where it is told to, once, until it is let go: tests end processes of its job then.

STAYS_AT: at start-up, in a step, in a save, in a recovery, in a resize or at the end. Rank 0 stays there, makes
the file `stays` in the job's folder, and goes on when there is a file `let-go`. Each rank starts a child and makes a
segment of shared memory, which it never removes: `left.jsonl` has both.
"""

import json
import os
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyperpod_ext.runtime import Run, resilient

WHERE = os.environ["STAYS_AT"]
HERE = Path(os.environ["HPX_RUN_DIR"])
STEP, STEPS = 3, 6
FOR_EVER = int(os.environ.get("STEPS", "1000000"))
PAUSE_S = float(os.environ.get("PAUSE", "0.05"))
AFTER = 3
"""Steps that are made after a resize."""


def stay(where: str) -> None:
    if where != WHERE or os.environ["RANK"] != "0":
        return
    try:
        (HERE / "stays").touch(exist_ok=False)
    except FileExistsError:
        return
    while not (HERE / "let-go").exists():
        time.sleep(0.02)


class Counter:
    """State whose capture can take long."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        if self.step == STEP:
            stay("in a save")
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


@resilient
def train(run: Run) -> None:
    model, counter = run.keep(lambda: nn.Linear(4, 1)), run.keep(Counter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if run.generation > 1:
        stay(WHERE if WHERE in ("in a recovery", "in a resize") else "")
    begun = run.restore(model=model, optimizer=optimizer, counter=counter)
    parallel = run.data_parallel(model)
    for step in run.steps(FOR_EVER if WHERE == "in a resize" else STEPS):
        if step == STEP and run.generation == 1:
            if WHERE == "in a recovery" and run.rank == 1:
                os.kill(os.getpid(), 9)
            stay("in a step")
        if WHERE == "in a resize" and run.generation > 1 and step > begun + AFTER:
            return
        resized = WHERE == "in a resize"
        time.sleep(PAUSE_S if resized else 0.0)
        drawn = torch.Generator().manual_seed(step) if resized else None  # the same for each number of ranks
        loss = parallel(torch.randn(2, 4, generator=drawn)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        counter.step = step
        mean = loss.detach() / run.world_size
        dist.all_reduce(mean)
        run.log(loss=mean)


child = subprocess.Popen(["sleep", "600"])
segment = SharedMemory(create=True, size=4096)
with (HERE / "left.jsonl").open("a") as file:
    file.write(
        json.dumps({"rank": int(os.environ["RANK"]), "pid": os.getpid(), "segment": segment.name, "child": child.pid})
        + "\n"
    )
stay("at start-up")
train()
stay("at the end")
sys.stdout.close()  # as scripts do that wrote to a file of their own
