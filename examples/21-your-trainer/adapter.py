"""The adapter between the trainer of loop.py and a run. docs/your-own-trainer.md explains each part."""

from collections.abc import Iterable
from typing import Any

import torch
from loop import Hooks, Loop
from torch import nn

from hyperpod_ext.integrations.adapters import check_adapter
from hyperpod_ext.integrations.remembered import Remembered
from hyperpod_ext.integrations.steps import Steps
from hyperpod_ext.integrations.trainer_loader import TrainerLoader
from hyperpod_ext.runtime import Run


class ResilientLoop(Loop):
    """`Loop` on a run. Create it inside the training function, with a model from `run.keep`."""

    def __init__(self, run: Run, model: nn.Module, batches: Any, epochs: int, hooks: Iterable[Hooks] = ()) -> None:
        check_adapter(run, "ResilientLoop")
        self.run = run
        data = TrainerLoader(batches, seed=run.config.seed, rank=run.rank, per_step=1)
        super().__init__(model, data, epochs, [_Follow(run, data), *hooks])

    def wrap(self, model: nn.Module) -> nn.Module:
        return self.run.data_parallel(model)


class _Follow(Hooks):
    """Reports the steps of the loop to the run."""

    def __init__(self, run: Run, data: TrainerLoader) -> None:
        self.run, self.data = run, data

    def before_training(self, loop: Loop) -> None:
        def read() -> dict[str, float]:
            return {"best": loop.best, "total": loop.total}

        self.own = Remembered(read, lambda state: vars(loop).update(state))
        state = {"model": loop.model, "optimizer": loop.optimizer, "data": self.data, "trainer": self.own}
        loop.step = self.run.restore(**state)
        loop.epoch = self.data.epoch
        self.data.set_epoch(loop.epoch)
        self.steps = Steps(self.run, loop.epochs * self.data.steps_per_epoch)

    def before_step(self, loop: Loop) -> None:
        self.own.freeze()
        self.steps.begin()

    def after_step(self, loop: Loop, loss: torch.Tensor) -> None:
        self.steps.add_loss(loss)
        self.steps.log_loss()
        self.data.step_made()

    def after_epoch(self, loop: Loop) -> None:
        self.data.epoch_made()
        self.data.set_epoch(loop.epoch)

    def after_training(self, loop: Loop) -> None:
        self.own.freeze()
        self.steps.end()
