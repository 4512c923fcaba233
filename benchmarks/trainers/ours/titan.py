"""TorchTitan's Trainer, with the job's snapshots."""

from pathlib import Path

import torch.distributed as dist

import toy
from titan_on_cpu import on_cpu

on_cpu()  # before TorchTitan is imported

import torchtitan.distributed.utils as titan_groups  # noqa: E402
from torchtitan.components.checkpoint import ModelWrapper  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

from hyperpod_ext.integrations.titan import RunCheckpointer  # noqa: E402
from hyperpod_ext.runtime import Run, resilient  # noqa: E402


@resilient
def main(run: Run) -> None:
    def build() -> Trainer:
        titan_groups.init_distributed = lambda *_, **__: dist.get_world_size()  # the job has opened the groups
        return Trainer(ConfigManager().parse_args(["--job.config_file", str(Path(__file__).with_name("debug.toml"))]))

    trainer = run.keep(build)
    trainer.metrics_processor.log = lambda _step, loss, *_, **__: run.log(loss=loss)
    trainer.checkpointer = RunCheckpointer(
        run,
        total=toy.STEPS,
        model=ModelWrapper(trainer.model_parts),
        optimizers=trainer.optimizers,
        lr_schedulers=trainer.lr_schedulers,
        dataloader=trainer.dataloader,
        train_state=trainer,
    )
    with trainer.checkpointer:
        trainer.train()


main()
