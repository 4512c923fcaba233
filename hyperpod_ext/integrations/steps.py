"""Steps of a run for loops of other libraries, which call `begin` instead of iterating."""

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
    """`run.steps(total)`, driven by callbacks. A context, so that an exception closes the steps at once: the garbage
    collector could close them in the middle of another step.

    A step is committed when the next one begins, or by `end`, so changes after the callbacks are included.
    """

    def __init__(self, run: Run, total: int) -> None:
        """Call `run.restore` first. Raises JobFailedError if `total` is not positive."""
        if total < 1:
            raise JobFailedError(f"{total} steps", hint="Say how many optimizer steps the run has, from 1.")
        self._run, self._total = run, total
        self._steps: Iterator[int] | None = None
        self._sum: torch.Tensor | None = None

    def begin(self) -> int:
        """Commit the step before, begin the next one, and return its number."""
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
        """Add this rank's mean loss of a micro-batch, divided by the number of micro-batches."""
        loss = loss.detach().clone()
        self._sum = loss if self._sum is None else self._sum + loss

    def log_loss(self) -> None:
        """Log the step's loss, averaged over all ranks. Collective."""
        if self._sum is not None:
            mean = self._sum / self._run.world_size
            dist.all_reduce(mean)
            self._run.log(loss=mean)

    def end(self) -> None:
        """Commit the last step of the loop, also if it ended before `total` steps."""
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
        with contextlib.suppress(StaleGenerationError, NotFoundError):  # a save of an older generation
            self.close()


class Batches:
    """Micro-batches of the rest of an epoch, without weights, because all have the same."""

    def __init__(self, loader: ElasticDataLoader) -> None:
        self.loader, self.dataset = loader, loader.source
        self.now: Step | None = None
        """Step that was read last."""

    def __len__(self) -> int:
        return len(self.loader.sampler)

    def __iter__(self) -> Iterator[Any]:
        for step in self.loader:
            self.now = step
            yield from step.micro_batches

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the run has the state. Lightning requires the method."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `state_dict`."""
