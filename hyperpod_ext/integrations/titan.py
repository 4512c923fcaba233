"""A checkpointer for loops like TorchTitan's, which count their own steps and call `load` and `save`:

    checkpointer = RunCheckpointer(run, total=1000, model=model, optimizers=optimizer, dataloader=loader)
    step = checkpointer.load()
    while step < 1000:
        step += 1
        train_step()
        checkpointer.save(step, last_step=step == 1000)

`RunCheckpointer` has the methods of TorchTitan's CheckpointManager that TorchTitan's loop calls. TorchTitan need not be
installed.
"""

from __future__ import annotations

from types import TracebackType

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.integrations.adapters import check_adapter
from hyperpod_ext.integrations.steps import Steps
from hyperpod_ext.runtime.state.training_state import Stateful
from hyperpod_ext.runtime.training.run import Run


class RunCheckpointer:
    """Commits the steps of a loop that calls `load` once and `save` after each step.

    `load` begins the run's next step. `save` commits the current step, and begins the following step. The job's
    `checkpoint` policy determines when a snapshot is made, and to which tiers it is copied.

    Use this object as a context manager around the loop, so that the steps are closed even after an exception.
    """

    def __init__(self, run: Run, *, total: int, **states: Stateful) -> None:
        """Make a checkpointer.

        Args:
            run: the run whose steps are committed.
            total: number of steps of the whole job.
            states: objects with state_dict() and load_state_dict(), with the same names on every rank.
        """
        check_adapter(run, "RunCheckpointer")
        self._run, self._total, self._states = run, total, states
        self._steps = Steps(run, total)
        self._step = -1

    def load(self, step: int = -1) -> int:
        """Restore the newest step that every rank can restore, and return its number; 0 at the job's start. Collective.

        Raises:
            JobFailedError: `step` is neither -1 nor the restored step.
        """
        self._step = self._run.restore(**self._states)  # type: ignore[arg-type]  # no state is named `cast`
        if step not in (-1, self._step):
            raise JobFailedError(
                f"load(step={step}): the job continues from step {self._step}",
                hint="Call load() without a step. To continue from another step, use `hp-ext checkpoints`.",
            )
        if self._step < self._total:
            self._steps.begin()
        return self._step

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Commit `curr_step`, and begin the following step unless `curr_step` is the last step.

        Raises:
            JobFailedError: `curr_step` does not follow the last committed step, `last_step` is wrong, or `load` was not
                called.
        """
        if self._step < 0 or curr_step != self._step + 1 or last_step != (curr_step == self._total):
            before = "before load()" if self._step < 0 else f"after step {self._step} of {self._total}"
            raise JobFailedError(
                f"save({curr_step}, last_step={last_step}) was called {before}",
                hint="Call load() first, then save() after each step, with last_step=True after the last step.",
            )
        self._step = curr_step
        if last_step:
            self._steps.end()
        else:
            self._steps.begin()

    def maybe_wait_for_staging(self) -> None:
        """Do nothing, because a hook of the optimizer waits for a snapshot that is still being copied."""

    def maybe_wait_for_saving(self) -> None:
        """Do nothing: snapshots are written during training, and the job waits at its end for the last snapshot."""

    def close(self) -> None:
        """Close the run's steps."""
        self._steps.close()

    def __enter__(self) -> RunCheckpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._steps.__exit__(kind, error, at)
