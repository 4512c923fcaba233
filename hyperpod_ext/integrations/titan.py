"""A checkpointer for loops like TorchTitan's, which count their own steps and call `load` and `save`:

    checkpointer = RunCheckpointer(run, total=1000, model=model, optimizers=optimizer, dataloader=loader)
    step = checkpointer.load()
    while step < 1000:
        step += 1
        train_step()
        checkpointer.save(step, last_step=step == 1000)

It has the methods of TorchTitan's CheckpointManager that its loop calls. TorchTitan is not needed.
"""

from __future__ import annotations

from types import TracebackType

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.integrations.adapters import check_adapter
from hyperpod_ext.integrations.steps import Steps
from hyperpod_ext.runtime.state.training_state import Stateful
from hyperpod_ext.runtime.training.run import Run


class RunCheckpointer:
    """`load` begins the run's next step; `save` commits it, and begins the one after.

    Call `save` after each step: the job's `checkpoint` decides when snapshots go to which tier. A context; leave it
    when the loop ends, with an exception or without.
    """

    def __init__(self, run: Run, *, total: int, **states: Stateful) -> None:
        """states: objects with state_dict() and load_state_dict(), of the same names on every rank."""
        check_adapter(run, "RunCheckpointer")
        self._run, self._total, self._states = run, total, states
        self._steps = Steps(run, total)
        self._step = -1

    def load(self, step: int = -1) -> int:
        """Restore the newest step that every rank can restore, and return it; 0 at the first start. Collective.

        Raises:
            JobFailedError: `step` is another step.
        """
        self._step = self._run.restore(**self._states)  # type: ignore[arg-type]  # none is named cast
        if step not in (-1, self._step):
            raise JobFailedError(
                f"load(step={step}): the job goes on from step {self._step}",
                hint="Call load() without a step; `hp-ext checkpoints` chooses another one.",
            )
        if self._step < self._total:
            self._steps.begin()
        return self._step

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Commit `curr_step`.

        Raises:
            JobFailedError: it is not the next step, or `load` was not called.
        """
        if self._step < 0 or curr_step != self._step + 1 or last_step != (curr_step == self._total):
            raise JobFailedError(
                f"save({curr_step}, last_step={last_step}) after step {self._step} of {self._total}",
                hint="Call load() first, then save() after each step, with last_step at the last one.",
            )
        self._step = curr_step
        if last_step:
            self._steps.end()
        else:
            self._steps.begin()

    def maybe_wait_for_staging(self) -> None:
        """Do nothing: the optimizer's hook waits for snapshots that are being copied."""

    def maybe_wait_for_saving(self) -> None:
        """Do nothing: snapshots are written during training, and the job's end waits for the last one."""

    def close(self) -> None:
        """Close the steps."""
        self._steps.close()

    def __enter__(self) -> RunCheckpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._steps.__exit__(kind, error, at)
