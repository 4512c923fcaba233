"""A small model and Lightning, with Lightning's own checkpoints."""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

import toy


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


def main() -> None:
    loader = DataLoader(toy.Rotated(), batch_size=8, shuffle=True, drop_last=True)
    trainer = L.Trainer(
        max_steps=toy.STEPS,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        callbacks=[ModelCheckpoint(toy.OUT, every_n_train_steps=toy.SAVE_EVERY, save_last=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), loader, ckpt_path="last")


main()
