"""Trains with a loss scaler on a CPU, by the library that the first argument names. The scale is too large at first: a
scaler that begins anew skips steps again, and losses show it. It must not run but as a job's script."""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist

from hyperpod_ext.runtime import Run, resilient
from hyperpod_ext.runtime.data import ElasticDataLoader

STEPS = 16


class Turned(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random vectors, and the same turned by one place and made longer."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, x.roll(1) * 4


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences of tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(64, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


def scaler() -> torch.amp.GradScaler:
    """The loss times its first scale is more than a float32 holds."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-30, growth_interval=6)


def loader(run: Run) -> ElasticDataLoader:
    shares = {"rank": run.rank, "world_size": run.world_size}
    return ElasticDataLoader(Turned(), global_batch_size=4, micro_batch_size=2, drop_last=True, **shares)


def by_lightning(run: Run) -> None:
    import lightning as L  # noqa: N812
    from lightning.pytorch.plugins import MixedPrecision

    from hyperpod_ext.integrations.lightning import ResilientTrainer

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return (self.layer(batch[0]).float() - batch[1]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    mixed = MixedPrecision("16-mixed", "cpu", scaler=scaler())
    ResilientTrainer(run, max_steps=STEPS, plugins=[mixed], **quiet).fit(run.keep(Model), loader(run))


def by_hugging_face(run: Run) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from hyperpod_ext.integrations.hugging_face import ResilientTrainer

    def build() -> LlamaForCausalLM:
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        max_grad_norm=0,  # on a CPU nobody unscales what is clipped
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    trainer = ResilientTrainer(run, model=run.keep(build), args=arguments, train_dataset=Words())
    trainer.accelerator.scaler = scaler()  # on a GPU fp16=True makes one
    trainer.train()


def by_accelerate(run: Run) -> None:
    from hyperpod_ext.integrations.accelerate import ResilientAccelerator

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(8, 8)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    accelerator = ResilientAccelerator(run, cpu=True)
    accelerator.scaler = scaler()  # on a GPU mixed_precision="fp16" makes one
    samples = loader(run)
    accelerator.register_for_checkpointing(samples)
    model, optimizer = accelerator.prepare(*run.keep(build))
    for _, step in zip(run.steps(STEPS), samples.steps(), strict=False):
        total = torch.zeros(())
        for (x, y), weight in step:
            loss = (model(x) - y).square().mean() * weight
            accelerator.backward(loss * run.world_size)
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        samples.ack(step)
        dist.all_reduce(total)
        run.log(loss=total)


if __name__ == "__main__":
    by = {"lightning": by_lightning, "hugging-face": by_hugging_face, "accelerate": by_accelerate}
    resilient(by[sys.argv[1]])()
