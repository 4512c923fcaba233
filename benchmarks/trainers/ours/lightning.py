"""A small model and Lightning, with the job's snapshots."""

import lightning as L
import torch
from torch import nn

import toy
from hyperpod_ext.integrations.lightning import ResilientTrainer
from hyperpod_ext.runtime import Run, resilient
from hyperpod_ext.runtime.data import ElasticDataLoader


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))

    def training_step(self, batch, _):
        x, y = batch
        return (self.layers(x) - y).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, toy.STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@resilient
def main(run: Run) -> None:
    loader = ElasticDataLoader(
        toy.Rotated(),
        global_batch_size=16,
        micro_batch_size=8,
        rank=run.rank,
        world_size=run.world_size,
        drop_last=True,
    )
    trainer = ResilientTrainer(
        run,
        max_steps=toy.STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(run.keep(Model), loader)


main()
