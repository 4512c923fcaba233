"""Prints what each integration says to what it cannot do; run by the tests in an environment that has the libraries."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable

import lightning
import torch
import torch.distributed.fsdp
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.integrations.accelerate import ResilientAccelerator
from hyperpod_ext.integrations.hugging_face import ResilientTrainer as HuggingFaceTrainer
from hyperpod_ext.integrations.lightning import ResilientTrainer as LightningTrainer
from hyperpod_ext.runtime import Run, resilient
from hyperpod_ext.runtime.data import ElasticDataLoader

SAMPLES = torch.utils.data.TensorDataset(torch.randn(10, 2))


class Module(lightning.LightningModule):
    def __init__(self, optimizers: int = 1, automatic: bool = True) -> None:
        super().__init__()
        self.layer, self.optimizers_wanted, self.automatic_optimization = torch.nn.Linear(2, 2), optimizers, automatic

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(self.optimizers_wanted)]


def loader(batch: int = 4, micro: int = 4, *, drop_last: bool = True) -> ElasticDataLoader:
    return ElasticDataLoader(
        SAMPLES, global_batch_size=batch, micro_batch_size=micro, rank=0, world_size=1, drop_last=drop_last
    )


def fit(run: Run, module: Module, data: object, **options: object) -> None:
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    LightningTrainer(run, max_steps=2, **quiet, **options).fit(module, data)


def hugging_face(run: Run, kind: type = HuggingFaceTrainer, data: object = SAMPLES, **options: object) -> None:
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **shape))
    arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), max_steps=2, use_cpu=True, report_to="none", **options)
    kind(run, model=model, args=arguments, train_dataset=data).train()


def shards(run: Run, **options: object) -> None:
    """A model in shards, with checkpoints of transformers."""

    def build() -> torch.nn.Module:
        return torch.distributed.fsdp.fully_shard(torch.nn.Linear(2, 2))

    arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to="none", **options)
    HuggingFaceTrainer(run, model=run.keep(build), args=arguments, train_dataset=SAMPLES)


class Lines(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> object:
        return iter(SAMPLES)


class Sampling(Trainer):
    """As a trainer of another library, which has a loader of its own."""

    def get_train_dataloader(self) -> object:
        return torch.utils.data.DataLoader(SAMPLES)


class Hidden(Sampling, HuggingFaceTrainer):
    """The bases in the wrong order."""


def without_adapter(run: Run) -> None:
    run.restore(model=run.keep(lambda: torch.nn.Linear(2, 2)))
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    lightning.Trainer(max_steps=2, devices=1, **quiet).fit(Module(), torch.utils.data.DataLoader(SAMPLES))


def prepare(run: Run, *things: object, times: int = 1) -> None:
    accelerator = ResilientAccelerator(run, cpu=True)
    for _ in range(times):
        accelerator.prepare(*things)


def register_late(run: Run) -> None:
    accelerator = ResilientAccelerator(run, cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.register_for_checkpointing(torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 1))


def steps_with_a_loader(run: Run) -> None:
    prepare(run, torch.utils.data.DataLoader(SAMPLES))
    next(run.steps(1))


CASES: dict[str, Callable[[Run], object]] = {
    "lightning: a DataLoader": lambda run: fit(run, Module(), torch.utils.data.DataLoader(SAMPLES)),
    "lightning: devices": lambda run: LightningTrainer(run, devices=3),
    "lightning: no optimizer": lambda run: fit(run, Module(optimizers=0), loader()),
    "lightning: by hand": lambda run: fit(run, Module(automatic=False), loader()),
    "lightning: accumulation": lambda run: fit(run, Module(), loader(4, 2)),
    "lightning: a broken step": lambda run: fit(run, Module(), loader(drop_last=False)),
    "hugging face: another batch": lambda run: hugging_face(run, per_device_train_batch_size=2),
    "hugging face: a stream": lambda run: hugging_face(run, data=Lines(), per_device_train_batch_size=1),
    "hugging face: bases": lambda run: hugging_face(run, Hidden),
    "hugging face: FSDP1": lambda run: hugging_face(run, fsdp=True, fsdp_config={"version": 1}),
    "hugging face: checkpoints of shards": shards,
    "lightning: changing accumulation": lambda run: fit(
        run, Module(), loader(), callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})]
    ),
    "lightning: a checkpoint": lambda run: LightningTrainer(run).fit(Module(), loader(), ckpt_path="last.ckpt"),
    "lightning: no adapter": without_adapter,
    "accelerate: steps with a DataLoader": steps_with_a_loader,
    "accelerate: epochs without a DataLoader": lambda run: ResilientAccelerator(run, cpu=True).epochs([], 1),
    "accelerate: a DataLoader by itself": lambda run: ResilientAccelerator(run, cpu=True).prepare_data_loader(
        torch.utils.data.DataLoader(SAMPLES)
    ),
    "accelerate: registered late": register_late,
    "accelerate: twice": lambda run: prepare(run, torch.nn.Linear(2, 2), times=2),
}


def said(case: Callable[[Run], object]) -> list[str]:
    try:
        resilient(case)()
    except JobFailedError as error:
        return [str(error), error.hint]
    return []


if __name__ == "__main__":
    print(json.dumps({name: said(case) for name, case in CASES.items()}))
