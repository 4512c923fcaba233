"""A trainer as a team may have one: it owns the loop and the optimizer, and calls methods of hooks."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class Hooks:
    """Methods that the loop calls. Subclasses override some of them."""

    def before_training(self, loop: "Loop") -> None: ...
    def before_step(self, loop: "Loop") -> None: ...
    def after_step(self, loop: "Loop", loss: torch.Tensor) -> None: ...
    def after_epoch(self, loop: "Loop") -> None: ...
    def after_training(self, loop: "Loop") -> None: ...


class Loop:
    """Trains `model` for a number of epochs, and keeps the lowest loss of an epoch."""

    def __init__(self, model: nn.Module, batches: Any, epochs: int, hooks: Iterable[Hooks] = ()) -> None:
        self.model, self.batches, self.epochs, self.hooks = model, batches, epochs, list(hooks)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.best, self.total, self.epoch, self.step = float("inf"), 0.0, 0, 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model whose backward pass averages the gradients of all ranks."""
        return nn.parallel.DistributedDataParallel(model)

    def call(self, name: str, *values: Any) -> None:
        for each in self.hooks:
            getattr(each, name)(self, *values)

    def train(self) -> None:
        self.call("before_training")
        wrapped = self.wrap(self.model)
        while self.epoch < self.epochs:
            for x, y in self.batches:
                self.call("before_step")
                self.optimizer.zero_grad()
                loss = (wrapped(x) - y).square().mean()
                loss.backward()
                self.optimizer.step()
                self.step, self.total = self.step + 1, self.total + loss.item()
                self.call("after_step", loss)
            self.best, self.total = min(self.best, self.total), 0.0
            self.epoch += 1
            self.call("after_epoch")
        self.call("after_training")
