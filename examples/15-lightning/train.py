"""A small model learns a rotation in Lightning: its module, its Trainer, its validation.

hp-ext create-job -f job.yaml --target local --wait
"""

import argparse

import lightning as L
import torch
from torch import nn

from hyperpod_ext.integrations.lightning import ResilientTrainer
from hyperpod_ext.runtime import Run, resilient
from hyperpod_ext.runtime.data import ElasticDataLoader


class Turned(torch.utils.data.Dataset):
    """Random vectors, and the same turned by one place."""

    def __init__(self, first: int, length: int) -> None:
        self.first, self.length = first, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(64, generator=torch.Generator().manual_seed(self.first + index))
        return x, x.roll(1)


class Model(L.LightningModule):
    """A small network, with dropout and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        return (self.layers(x) - y).square().mean()

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> None:
        x, y = batch
        self.log("held_out_loss", (self.layers(x) - y).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@resilient
def train(run: Run) -> None:
    loader = ElasticDataLoader(
        Turned(0, 256),  # an epoch of 8 steps
        global_batch_size=32,
        micro_batch_size=8,
        rank=run.rank,
        world_size=run.world_size,
        drop_last=True,
    )
    held_out = torch.utils.data.DataLoader(Turned(256, 32), batch_size=8, generator=torch.Generator())
    trainer = ResilientTrainer(
        run,
        max_steps=args.steps,
        accumulate_grad_batches=4 // run.world_size,
        accelerator="auto",
        logger=False,
        enable_checkpointing=False,  # snapshots are the job's
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(run.keep(Model), loader, held_out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    args = parser.parse_args()
    train()
