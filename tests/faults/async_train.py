"""Trains on a device that works behind the loop (support/async_device.py), under DDP or FSDP2, with faults anywhere.

HPX_TEST_PARALLEL is `ddp` or `fsdp2`; HPX_TEST_FUSED: a fused AdamW in place of SGD with momentum; HPX_TEST_AHEAD:
steps that the loop runs ahead; HPX_TEST_STEPS; HPX_TEST_FAULTS: a JSON list of `{"place": P, "how": "kill" or "raise",
"rank": R, "step": S}`, where P is one of PLACES or seconds after the step began.
"""

import json
import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
from async_device import AsyncDevice
from torch import nn

from hyperpod_ext.runtime import Run, resilient
from hyperpod_ext.runtime.process_group import nccl_backend
from hyperpod_ext.runtime.process_group.groups import ProcessGroups
from hyperpod_ext.runtime.state import device_steps

PLACES = ("forward", "backward", "accumulated", "optimizer", "rest")
STEPS = int(os.environ.get("HPX_TEST_STEPS", "12"))
PARALLEL = os.environ.get("HPX_TEST_PARALLEL", "ddp")
FUSED = bool(os.environ.get("HPX_TEST_FUSED"))
FAULTS = json.loads(os.environ.get("HPX_TEST_FAULTS", "[]"))
MICRO_BATCHES = 2
HERE = Path(os.environ["HPX_RUN_DIR"])
DEVICE = AsyncDevice(ahead=int(os.environ.get("HPX_TEST_AHEAD", "1")))
MUTANT = os.environ.get("HPX_TEST_MUTANT", "")


def spoil() -> None:
    """Break the rule by which a step counts, on purpose: a test must see it."""
    steps = device_steps.DeviceSteps
    if MUTANT == "no query":  # what was queued counts as done

        def trust(self):
            self._finished = self._newest

        steps._look = trust
    elif MUTANT == "query after abort":  # the markers behind what was aborted are reached, too
        abort = ProcessGroups.abort

        def ask_late(groups):
            ask, groups.before_abort = groups.before_abort, lambda: None
            abort(groups)
            DEVICE.record().synchronize()
            groups.before_abort = ask
            ask()

        ProcessGroups.abort = ask_late
    elif MUTANT == "stuck abort" and os.environ["RANK"] == "2" and not (HERE / "stuck").exists():
        (HERE / "stuck").touch()  # not the process that takes this one's place
        nccl_backend._LIMIT_S = 0.2
        abort_device = DEVICE.abort

        def abort_and_stay():
            abort_device()  # or nobody would come as far as to wait for it
            threading.Event().wait()

        DEVICE.abort = abort_and_stay


def strike(run: Run, step: int, place: str) -> None:
    """Fail here, where a fault is due."""
    for number, fault in enumerate(FAULTS):
        if (fault["rank"], fault["step"]) != (run.rank, step) or (HERE / f"spent-{number}").exists():
            continue
        if isinstance(fault["place"], float) and place == "forward":
            (HERE / f"spent-{number}").touch()
            threading.Timer(fault["place"], os.kill, (os.getpid(), 9)).start()
        elif fault["place"] == place:
            (HERE / f"spent-{number}").touch()
            if fault["how"] == "kill":
                os.kill(os.getpid(), 9)
            raise ValueError(f"fault {number} in step {step}, {place}")


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    if PARALLEL == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0])
        fully_shard(model)
    if FUSED:
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)


@resilient
def train(run: Run) -> None:
    model, optimizer = run.keep(build)
    run.restore(model=model, optimizer=optimizer)
    parallel = run.data_parallel(model, init_sync=False) if PARALLEL == "ddp" else model
    losses = {}
    for step in run.steps(STEPS):
        batches = [torch.randn(4, 8) for _ in range(MICRO_BATCHES)]
        with DEVICE.working():
            for micro, batch in enumerate(batches):
                strike(run, step, "forward")
                loss = parallel(batch).square().mean()
                loss.backward()
                strike(run, step, "accumulated" if micro else "backward")
            optimizer.step()
            strike(run, step, "optimizer")
            optimizer.zero_grad()
            losses[step] = loss.detach()
        strike(run, step, "rest")
    for step, loss in losses.items():
        run.log(**{f"loss_{step}": loss})
    run.log(most_ahead=DEVICE.most_ahead)


spoil()
DEVICE.install()
train()
