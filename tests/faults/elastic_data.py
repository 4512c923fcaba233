"""A training script that reads through ElasticDataLoader, and writes down which samples each committed step had."""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hyperpod_ext.runtime import Run, resilient
from hyperpod_ext.runtime.data import ElasticDataLoader

STEPS = int(os.environ.get("HPX_TEST_STEPS", "12"))
KIND = os.environ.get("HPX_TEST_WORKERS", "process")
STAYS = int(os.environ.get("HPX_TEST_STAYS", "0"))
"""A step in which every rank stays until it is killed."""
DROPOUT = float(os.environ.get("HPX_TEST_DROPOUT", "0"))
HERE = Path(os.environ["HPX_RUN_DIR"])


class Samples:
    """Numbers with noise, as augmentation adds it."""

    fingerprint = "numbers"

    def __len__(self) -> int:
        return 101

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        noise = torch.rand(4) if KIND == "process" else torch.zeros(4)
        return index, torch.full((4,), index / 100) + noise


@resilient
def train(run: Run) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Dropout(DROPOUT), nn.Linear(4, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = run.keep(build)
    samples = Samples()
    if run.rank == int(os.environ.get("HPX_TEST_OTHER_DATA", "-1")):
        samples.fingerprint = "older numbers"
    loader = ElasticDataLoader(
        samples, global_batch_size=12, micro_batch_size=2, workers=2, worker_kind=KIND, prefetch=3
    )
    run.restore(model=model, optimizer=optimizer, data=loader)
    parallel = run.data_parallel(model)
    record = (HERE / f"samples-{run.rank}.jsonl").open("a")
    for number, step in zip(run.steps(STEPS), loader.steps(), strict=False):
        assert step.number == number
        while number == STAYS:
            time.sleep(0.02)
        optimizer.zero_grad()
        total = torch.zeros(())
        for (ids, x), weight in step:
            loss = parallel(x).square().mean() * weight * run.world_size
            loss.backward()
            total += loss.detach()
            if weight:
                record.write(json.dumps([number, ids.tolist()]) + "\n")
        record.flush()
        total /= run.world_size
        dist.all_reduce(total)
        optimizer.step()
        loader.ack(step)
        run.log(loss=total)


if __name__ == "__main__":
    train()
