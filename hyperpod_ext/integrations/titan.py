"""A checkpointer for loops like TorchTitan's, which count their own steps and call `load` and `save`:

    checkpointer = RunCheckpointer(run, total=1000, model=model, optimizers=optimizer, dataloader=loader)
    step = checkpointer.load()
    while step < 1000:
        step += 1
        train_step()
        checkpointer.save(step, last_step=step == 1000)

It has the methods that TorchTitan's CheckpointManager is called by. TorchTitan is not needed.
"""

from __future__ import annotations

from types import TracebackType

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.integrations.steps import Steps
from hyperpod_ext.runtime.state.training_state import Stateful
from hyperpod_ext.runtime.training.run import Run


class RunCheckpointer:
    """`load` begins the run's first step that is still to be made; `save` commits it, and begins the next.

    How often a snapshot goes to which tier is the job's `checkpoint`, so `save` is called after each step. A context;
    leave it when the loop ends, however it does.
    """

    def __init__(self, run: Run, *, total: int, **states: Stateful) -> None:
        """states: objects with state_dict() and load_state_dict(), of the same names on every rank."""
        self._run, self._total, self._states = run, total, states
        self._steps = Steps(run, total)
        self._step = -1

    def load(self, step: int = -1) -> int:
        """Bring the states to the newest step that every rank can have; returns it, 0 at the very start. Collective.

        Raises:
            JobFailedError: another step was asked for.
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
        """`curr_step` is made.

        Raises:
            JobFailedError: it is not the next one, or `load` was not called.
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
        """The optimizer is about to step. A snapshot that is being copied is waited for by the optimizer's own hook."""

    def maybe_wait_for_saving(self) -> None:
        """A snapshot is written while training goes on; the last one is waited for at the end of the job."""

    def close(self) -> None:
        """Nothing is left to be made."""
        self._steps.close()

    def __enter__(self) -> RunCheckpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._steps.__exit__(kind, error, at)
