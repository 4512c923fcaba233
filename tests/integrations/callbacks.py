"""Callbacks of Lightning that remember: an average of the weights that a validation uses, and one that stops early."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging

from hyperpod_ext.integrations.lightning import ResilientTrainer
from hyperpod_ext.runtime import Run, resilient
from hyperpod_ext.runtime.data import ElasticDataLoader

SAMPLES = torch.utils.data.TensorDataset(torch.sin(torch.arange(192.0)).view(48, 4))


class Own(lightning.Callback):
    """Averages of its own, which scale the rate, without a `state_dict`."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}
        self.seen = 0

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.seen += 1
        for name, value in module.named_parameters():
            mean = self.shadow.setdefault(name, torch.zeros_like(value))
            mean.mul_(0.5).add_(value.detach(), alpha=0.5)
        largest = max(float(mean.abs().max()) for mean in self.shadow.values())
        trainer.optimizers[0].param_groups[0]["lr"] = 0.01 * largest + 0.001 * self.seen


class Module(lightning.LightningModule):
    """Gets worse from step to step, by its own measure."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(4, 4), 0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        self.seen += 1
        return (self.layer(batch[0]) - 1 - 0.01 * self.seen).square().mean()

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("worse", -(self.layer(batch[0]) - 1).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trained(run: Run, callback: Any) -> None:
    shares = {"rank": run.rank, "world_size": run.world_size}
    loader = ElasticDataLoader(SAMPLES, global_batch_size=8, micro_batch_size=4, drop_last=True, **shares)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = ResilientTrainer(run, max_steps=18, val_check_interval=2, callbacks=[callback], **quiet)
    module = run.keep(Module)
    trainer.fit(module, loader, torch.utils.data.DataLoader(SAMPLES, batch_size=16))
    total = sum(value.sum() for value in module.parameters()).detach()
    dist.all_reduce(total)
    run.log(ended_at=trainer.global_step, ended_with=total)


KINDS: dict[str, Callable[[], Any]] = {
    "average": lambda: EMAWeightAveraging(decay=0.5),
    "own": Own,
    "stops-early": lambda: EarlyStopping("worse", patience=6, check_on_train_epoch_end=False),
}

if __name__ == "__main__":
    resilient(lambda run: trained(run, KINDS[sys.argv[1]]()))()
