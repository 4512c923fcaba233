"""TorchTitan's own Trainer, FSDP2 over all ranks, as `test_trainers.py` runs it through faults.

TorchTitan asks for an accelerator; titan_on_cpu.py replaces what it asks of one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from titan_on_cpu import on_cpu

HERE = Path(__file__).parent


on_cpu()

import torch.distributed as dist  # noqa: E402
import torchtitan.distributed.utils as titan_groups  # noqa: E402
from torchtitan.components.checkpoint import ModelWrapper  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

from hyperpod_ext.integrations.titan import RunCheckpointer  # noqa: E402
from hyperpod_ext.runtime import Run, resilient  # noqa: E402

STEPS = 16


@resilient
def train(run: Run) -> None:
    def build() -> Any:
        os.environ.setdefault("LOCAL_RANK", "0")
        titan_groups.init_distributed = lambda *_, **__: dist.get_world_size()  # the job's own are there
        return Trainer(ConfigManager().parse_args(["--job.config_file", str(HERE / "debug.toml")]))

    trainer = run.keep(build)
    trainer.metrics_processor.log = lambda _step, loss, *_, **__: run.log(loss=loss)
    trainer.checkpointer = RunCheckpointer(
        run,
        total=STEPS,
        model=ModelWrapper(trainer.model_parts),
        optimizers=trainer.optimizers,
        lr_schedulers=trainer.lr_schedulers,
        dataloader=trainer.dataloader,
        train_state=trainer,
    )
    with trainer.checkpointer:
        trainer.train()


train()
