"""A training script that leaves behind what it can: children, children in sessions of their own, shared memory."""

import json
import os
import subprocess
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hyperpod_ext.runtime import Run, resilient

subprocess.Popen(["sleep", "600"])
subprocess.Popen(["true"], start_new_session=True)
apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
segment = SharedMemory(create=True, size=4096)
with (Path(os.environ["HPX_RUN_DIR"]) / "left.jsonl").open("a") as file:
    file.write(json.dumps({"rank": int(os.environ["RANK"]), "segment": segment.name, "apart": apart.pid}) + "\n")


@resilient
def train(run: Run) -> None:
    model = run.keep(lambda: nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.restore(model=model, optimizer=optimizer)
    data = iter(DataLoader(TensorDataset(torch.ones(100_000, 4)), num_workers=1, prefetch_factor=2))
    for _ in run.steps(100_000):
        loss = model(next(data)[0]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.distributed.barrier()
        run.log(loss=loss)


train()
