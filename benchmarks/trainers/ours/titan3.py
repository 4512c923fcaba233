"""TorchTitan 0.3's Trainer, with the job's snapshots."""

import toy
from titan_on_cpu import attention_on_cpu, on_cpu

on_cpu()  # before TorchTitan is imported

from titan3_config import small  # noqa: E402
from torchtitan.components.checkpointer.base import ModelWrapper  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from hyperpod_ext.integrations.titan import RunCheckpointer  # noqa: E402
from hyperpod_ext.runtime import Run, resilient  # noqa: E402


@resilient
def main(run: Run) -> None:
    attention_on_cpu()
    trainer = run.keep(lambda: Trainer(small(toy.STEPS)))
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
