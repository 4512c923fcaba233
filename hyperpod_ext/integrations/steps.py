"""The steps of a run, for a loop that is not ours: told of each step's begin, instead of being iterated over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from hyperpod_ext.errors import JobFailedError, NotFoundError, StaleGenerationError
from hyperpod_ext.runtime.data.loader import ElasticDataLoader, Step
from hyperpod_ext.runtime.training.run import Run


class Steps:
    """`run.steps(total)`, driven by callbacks. A context: what is left of it by an exception is closed there, because
    a trainer that the garbage collector finds later would close it in the middle of another step.

    A step is committed when the next one begins, or by `end`: with everything that the loop did after its callbacks.
    """

    def __init__(self, run: Run, total: int) -> None:
        """`run.restore` must have been called. Raises JobFailedError when `total` is not known."""
        if total < 1:
            raise JobFailedError(f"{total} steps", hint="Say how many optimizer steps the run has, from 1.")
        self._run, self._total = run, total
        self._steps: Iterator[int] | None = None
        self._sum: torch.Tensor | None = None

    def begin(self) -> int:
        """A step begins; its number. The one before is committed."""
        if self._steps is None:
            self._steps = self._run.steps(self._total)
        step = next(self._steps, None)
        if step is None:
            raise JobFailedError(
                f"a step after the last one, {self._total}", hint="Give the number of steps that the loop makes."
            )
        self._sum = None
        return step

    def add_loss(self, loss: torch.Tensor) -> None:
        """This rank's mean loss of a micro-batch, divided by their number."""
        loss = loss.detach().clone()
        self._sum = loss if self._sum is None else self._sum + loss

    def log_loss(self) -> None:
        """Record the mean over all ranks of what was added in this step. Collective."""
        if self._sum is not None:
            mean = self._sum / self._run.world_size
            dist.all_reduce(mean)
            self._run.log(loss=mean)

    def end(self) -> None:
        """The loop is over: commit the last step. A loop that ended before `total` steps has committed them, too."""
        if self._steps is None or next(self._steps, None) is None:
            return
        self.close()

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()  # type: ignore[attr-defined]  # it is a generator
            self._steps = None

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.end()
        with contextlib.suppress(StaleGenerationError, NotFoundError):  # a save that came too late
            self.close()


class Batches:
    """Micro-batches of the rest of an epoch, as a loop takes them: without weights, as all are alike."""

    def __init__(self, loader: ElasticDataLoader) -> None:
        self.loader, self.dataset = loader, loader.source
        self.now: Step | None = None
        """The step that was read last."""

    def __len__(self) -> int:
        return len(self.loader.sampler)

    def __iter__(self) -> Iterator[Any]:
        for step in self.loader:
            self.now = step
            yield from step.micro_batches

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the run has it. Lightning asks whether there is one."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `state_dict`."""
