"""A trainer of a library without our adapter: `python unprotected.py lightning|hugging-face|accelerate`."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch

SAMPLES = torch.utils.data.TensorDataset(torch.randn(12, 2))


def fit_lightning() -> None:
    from lightning import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Says(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
            print(f"step {trainer.global_step} is made")

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_steps=3, accelerator="cpu", callbacks=[Says()], **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(SAMPLES, batch_size=2))


def fit_hugging_face() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Says(TrainerCallback):
        def on_step_end(self, _args: object, state: Any, *_: object, **__: object) -> None:
            print(f"step {state.global_step} is made")

    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **shape))
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 12
    arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), max_steps=3, use_cpu=True, report_to="none")
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Says()]).train()


def fit_accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in range(1, 4):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        print(f"step {step} is made")


if __name__ == "__main__":
    {"lightning": fit_lightning, "hugging-face": fit_hugging_face, "accelerate": fit_accelerate}[sys.argv[1]]()
