"""Detect optimizer steps before the first step of `run.steps`, made by a trainer that does not use the run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hyperpod_ext.errors import JobFailedError


class EarlySteps:
    """A context that raises at an optimizer step before `end`, except inside `allowed`."""

    def __init__(self) -> None:
        self._hook: Any = None
        self._allowed = False

    def __enter__(self) -> None:
        self._hook = register_optimizer_step_pre_hook(self._see)

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop checking: the steps of the run begin."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Allow optimizer steps inside, as part of building or restoring."""
        self._allowed, before = True, self._allowed
        try:
            yield
        finally:
            self._allowed = before

    def _see(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._allowed:
            raise JobFailedError(
                f"{type(optimizer).__name__}.step() was called before the first step of run.steps: the run would know "
                "nothing of this training, and keep none of it",
                hint="Call run.restore(...), then make steps inside `for step in run.steps(...)`. A library's trainer "
                "needs an adapter: see docs/integrations.md. Steps that only build something belong into run.keep.",
            )
