"""A script with epochs: a shuffled DataLoader with random transforms, a schedule and a validation after each epoch.

HPX_TEST_SAMPLER is `distributed`, `random` or `own`; HPX_TEST_WORKERS the loader's processes. HPX_TEST_KILL is JSON,
`[rank, step, where]` with where `batch` or `end`, the work after the epoch whose last step it is; it strikes once.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import numpy as np
import torch
import torch.distributed as dist
from event_log import events_in
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from hyperpod_ext.runtime import Run, resilient

EPOCHS = 3
SAMPLER = os.environ.get("HPX_TEST_SAMPLER", "distributed")
WORKERS = int(os.environ.get("HPX_TEST_WORKERS", "0"))
RANK, STEP, WHERE = json.loads(os.environ.get("HPX_TEST_KILL", '[-1, 0, ""]'))
HERE = Path(os.environ["HPX_RUN_DIR"])


def strike(run: Run, step: int, where: str) -> None:
    if (run.rank, step, where) == (RANK, STEP, WHERE) and not (HERE / "spent").exists():
        while where == "batch" and not others_made(
            run, step - 1
        ):  # one that is cut after its optimizer has no live state
            time.sleep(0.005)
        (HERE / "spent").touch()
        os.kill(os.getpid(), 9)


def others_made(run: Run, step: int) -> bool:
    made = {
        event["rank"]
        for event in events_in(HERE / "events.jsonl")
        if event["event"] == "step" and event["step"] == step
    }
    return made >= set(range(run.world_size)) - {run.rank}


class Samples(Dataset):
    """Numbers with noise: a random transform."""

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 44.0, 1.0]) + 0.1 * torch.rand(2) + 0.1 * float(np.random.rand())


class Own(Sampler):
    """Goes on from epoch to epoch with a generator of its own, and outlives a call of the training function."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(5)

    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Iterator[int]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return iter(self.random.permutation(44)[rank::ranks].tolist())


own = Own()


def sampler(data: Dataset) -> Sampler | None:
    return {"distributed": DistributedSampler(data), "own": own, "random": None}[SAMPLER]


@resilient
def train(run: Run) -> None:
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.LayerNorm(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model = run.data_parallel(model)
    data = Samples()
    loader = DataLoader(data, 4, shuffle=SAMPLER == "random", sampler=sampler(data), num_workers=WORKERS)
    for epoch, batches in run.epochs(loader, EPOCHS, **locals()):
        model.train()
        for number, x in enumerate(batches, batches.first):
            step = epoch * len(loader) + number + 1
            loss = (model(x).squeeze() - x.sum(1)).square().mean()
            optimizer.zero_grad()
            strike(run, step, "batch")
            loss.backward()
            optimizer.step()
            run.log(loss=loss_of_all(run, loss), rate=optimizer.param_groups[0]["lr"])
        model.eval()
        with torch.no_grad():
            validation = loss_of_all(run, model(torch.rand(8, 2)).mean())
        schedule.step()
        strike(run, step, "end")
        (HERE / f"ends-{run.rank}").open("a").write(f"{epoch} {validation.item()} {run.step}\n")


def loss_of_all(run: Run, loss: torch.Tensor) -> torch.Tensor:
    mean = loss.detach() / run.world_size
    dist.all_reduce(mean)
    return mean


train()
