"""Steps of a run for the training loops of other libraries, whose callbacks call `begin` instead of iterating."""

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
    """The steps of `run.steps(total)`, for use in callbacks.

    Use this object as a context manager, so that an exception closes the generator of the steps at once. Without a
    context manager, the garbage collector would close the generator later, perhaps during another step.

    A step is committed when the next step begins, or by `end`, so that the step includes changes of all callbacks.
    """

    def __init__(self, run: Run, total: int) -> None:
        """Make the steps of `run`, after `run.restore` was called. Raises JobFailedError if `total` is not positive.

        `total`: number of steps of the whole job.
        """
        if total < 1:
            raise JobFailedError(
                f"the number of steps is {total}, but must be at least 1",
                hint="Pass the number of optimizer steps, 1 or more.",
            )
        self._run, self._total = run, total
        self._steps: Iterator[int] | None = None
        self._sum: torch.Tensor | None = None

    def begin(self) -> int:
        """Commit the previous step, begin the next step, and return the new step's number."""
        if self._steps is None:
            self._steps = self._run.steps(self._total)
        step = next(self._steps, None)
        if step is None:
            raise JobFailedError(
                f"the loop started another step after step {self._total}, the last step of the job",
                hint="Pass the number of steps that the loop makes.",
            )
        self._sum = None
        return step

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch to the step's loss.

        `loss`: this rank's mean loss of the micro-batch, divided by the number of micro-batches in the step.
        """
        loss = loss.detach().clone()
        self._sum = loss if self._sum is None else self._sum + loss

    def log_loss(self) -> None:
        """Log the step's loss, averaged over all ranks. Collective."""
        if self._sum is not None:
            mean = self._sum / self._run.world_size
            dist.all_reduce(mean)
            self._run.log(loss=mean)

    def end(self) -> None:
        """Commit the last step of the loop, even if the loop ended before `total` steps."""
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
        # `close` raises an error if the generation of the job has already ended
        with contextlib.suppress(StaleGenerationError, NotFoundError):
            self.close()


class Batches:
    """The remaining micro-batches of an epoch. The iterator yields no weights, because all weights are equal."""

    def __init__(self, loader: ElasticDataLoader) -> None:
        self.loader, self.dataset = loader, loader.source
        self.now: Step | None = None
        """The step whose micro-batches were read last; None before the first step."""

    def __len__(self) -> int:
        return len(self.loader.sampler)

    def __iter__(self) -> Iterator[Any]:
        for step in self.loader:
            self.now = step
            yield from step.micro_batches

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, because the run restores the loader. Lightning requires this method."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing, because the run restores the loader."""
