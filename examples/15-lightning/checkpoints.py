"""Lightning's own Trainer and ModelCheckpoint, with checkpoints that hold no pickle. Ends, is killed, starts again: it
goes on from the last epoch that was saved.

    python checkpoints.py --epochs 6
    torchrun --nproc-per-node 2 checkpoints.py --epochs 6
"""

import argparse
import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from hyperpod_ext.integrations.lightning_checkpoint import HyperpodCheckpointIO


class Model(L.LightningModule):
    """Learns to turn a vector by one place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = (self.layer(batch[0]) - batch[0].roll(1, 1)).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch}, loss {self.trainer.callback_metrics['loss'].item()!r}", flush=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--folder", type=Path, default="/tmp/hyperpod-ext-15-lightning", help="where checkpoints go")
    args = parser.parse_args()
    L.seed_everything(0, verbose=False)
    samples = torch.utils.data.TensorDataset(torch.randn(256, 64, generator=torch.Generator().manual_seed(1)))
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        plugins=[HyperpodCheckpointIO("example-15-lightning")],
        callbacks=[ModelCheckpoint(args.folder, monitor="loss", save_top_k=2, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Model(), torch.utils.data.DataLoader(samples, batch_size=16, generator=torch.Generator()), ckpt_path="last"
    )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # its threads must not outlive the interpreter
