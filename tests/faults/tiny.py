"""The training script of the fault tests: every kind of state, milliseconds a step, faults by order.

HPX_TEST_FAULT is JSON, `{"what": ..., "rank": R, "step": S}`; a fault strikes once per job, unless `always`.
`{"what": "code", "code": ..., "where": ..., "step": S}` is run at start-up, in a step, after the last, or after train.
`{"each": {WHAT: [R, S], ...}}` are several that kill, each on a rank of its own.
HPX_TEST_HOLD is JSON, `[[generation, rank, step], ...]`: there that rank stays, until somebody kills it or makes
the file `let-go` in the job's folder, or `let-go-6` for those of step 6 alone.
With HPX_TEST_SAYS each rank prints what step it makes.
HPX_TEST_SECONDS is how long each step waits, for jobs that run for a time and not for a number of steps.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hyperpod_ext.runtime import Run, resilient

STEPS = int(os.environ.get("HPX_TEST_STEPS", "12"))
FAULT = json.loads(os.environ.get("HPX_TEST_FAULT", "{}"))
HOLD = json.loads(os.environ.get("HPX_TEST_HOLD", "[]"))
NORM = getattr(nn, os.environ.get("HPX_TEST_NORM", "BatchNorm1d"))  # whose statistics are each rank's own
ZERO_LAST, FUSED = "HPX_TEST_ZERO_LAST" in os.environ, "HPX_TEST_FUSED" in os.environ
WIDTH = int(os.environ.get("HPX_TEST_WIDTH", "32"))
SAYS = "HPX_TEST_SAYS" in os.environ
DEVICE = os.environ.get("HPX_TEST_DEVICE", "cpu")
PAUSE_S = float(os.environ.get("HPX_TEST_SECONDS", "0"))
HERE = Path(os.environ["HPX_RUN_DIR"])
# memory of rank 2 that the kernel takes a while to give back
BALLAST = b"\1" * (int(os.environ.get("HPX_TEST_BALLAST_MIB", "0")) << 20 if os.environ.get("RANK") == "2" else 0)

if FAULT.get("what") == "script":
    raise ValueError("the script itself is broken")


def due(what: str, run: Run, step: int) -> bool:
    """Whether the fault called `what` strikes this rank now; marks it as spent."""
    if FAULT.get("each", {}).get(what) == [run.rank, step]:
        return spend(run.rank)
    if (
        FAULT.get("what") != what
        or FAULT["step"] != step
        or run.rank not in (FAULT["rank"], -1, *FAULT.get("ranks", []))
    ):
        return False
    return spend(run.rank)


def spend(rank: int) -> bool:
    """Mark this rank's fault as spent; whether it was not."""
    if is_spent(rank) and not FAULT.get("always"):
        return False
    (HERE / f"spent-{rank}").touch()
    return True


def is_spent(rank: int) -> bool:
    return (HERE / f"spent-{rank}").exists()


def is_held(run: Run, step: int) -> bool:
    """Whether this rank stays here."""
    gates = (HERE / "let-go", HERE / f"let-go-{step}")
    return [run.generation, run.rank, step] in HOLD and not any(gate.exists() for gate in gates)


def come_to(where: str) -> None:
    """Run the script's code that ends it, if it does so here."""
    rank = int(os.environ["RANK"])
    if FAULT.get("what") == "code" and FAULT["where"] == where and rank == FAULT["rank"] and spend(rank):
        exec(FAULT["code"], {"os": os, "sys": sys})


def corrupt_own_snapshots(run: Run, slots: list[int]) -> None:
    """Flip one bit in the middle of each of `slots` of this rank."""
    run._checkpointer.flush()  # what is sealed after this would have the checksum of the damage
    mapping = run._checkpointer._mapping
    for slot in slots:
        place = slot * mapping.slot_bytes + run._checkpointer._layout.plan.nbytes // 2
        mapping.memory[place] ^= 1


@resilient
def train(run: Run) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        layers = [nn.Linear(16, WIDTH), NORM(WIDTH), nn.Dropout(0.2), nn.ReLU(), nn.Linear(WIDTH, 1)]
        model = nn.Sequential(*layers).to(DEVICE)
        if FUSED:  # changes parameters without raising their version counters
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)

    model, optimizer, schedule = run.keep(build)
    run.restore(model=model, optimizer=optimizer, schedule=schedule)
    parallel = run.data_parallel(model)
    for step in run.steps(STEPS):
        if step == FAULT.get("step"):
            come_to("in a step")
        while is_held(run, step):
            time.sleep(0.02)
        if due("exception", run, step):
            raise ValueError(f"bad sample at step {step}")
        if due("illegal access", run, step):
            if DEVICE != "cpu":
                torch.zeros(1, device=DEVICE)[torch.full((1,), 9, device=DEVICE)].item()
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if due("sleeps", run, step):
            time.sleep(600)  # a rank that hangs outside of any collective: nothing wakes it but its end
        if (
            FAULT.get("what") == "sleeps"
            and step == FAULT["step"]
            and run.rank == FAULT["dies"]
            and run.generation == 1
        ):
            while not is_spent(FAULT["rank"]):  # else the one that sleeps may hear of this before, and sleep later
                time.sleep(0.005)
            os.kill(os.getpid(), 9)
        time.sleep(PAUSE_S)
        if SAYS:
            print(f"step {step}", flush=True)
        x = torch.randn(8, 16).to(DEVICE)
        loss = (parallel(x).squeeze() - x.sum(1)).square().mean()
        if not ZERO_LAST:
            optimizer.zero_grad()
        if due("before backward", run, step):
            os.kill(os.getpid(), 9)
        loss.backward()
        if due("leaves a child", run, step):
            if os.fork() == 0:
                time.sleep(600)  # as a data loader's worker would, with the sockets of its parent
            os.kill(os.getpid(), 9)
        if due("before optimizer", run, step):
            os.kill(os.getpid(), 9)
        optimizer.step()
        if due("after optimizer", run, step):
            os.kill(os.getpid(), 9)
        if due("torn", run, step):
            dist.barrier()  # all of them are past the optimizer before the first one fails
            raise ValueError("between the optimizer and the schedule")
        if due("torn and corrupt", run, step):
            if run.rank == FAULT["rank"]:
                corrupt_own_snapshots(run, FAULT["slots"])
            dist.barrier()
            raise ValueError("between the optimizer and the schedule")
        schedule.step()
        if ZERO_LAST:
            optimizer.zero_grad()
        mean = loss.detach() / run.world_size
        dist.all_reduce(mean)
        run.log(loss=mean)
    run.log(rate=schedule.get_last_lr()[0])
    come_to("after the last step")


come_to("at start-up")
train()
come_to("after train()")
