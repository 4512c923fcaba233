"""One rank of a script that saves and resumes by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hyperpod_ext.runtime.fault_injection.from_worker import run_dir_of
from hyperpod_ext.runtime.scripts.record import Steps
from hyperpod_ext.runtime.training.run import Run


class ScriptRun:
    """The step of a rank, reported to the job, and its folder for records of saves."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.rank = run.rank
        self.generation = run.generation
        self.link = run.link
        self.step = run.step
        """Newest step that the script has made. Before its first one: the newest step that it has saved."""
        self.run_dir = run_dir_of()
        self.records = self.run_dir / "script-saves"
        self.steps = Steps(self.records / f"rank{run.rank}.steps")
        run.early_steps.end()

    def record_of(self, rank: int) -> Path:
        """Return the file that records a rank's saves."""
        return self.records / f"rank{rank}.json"

    def begin(self, step: int, loaded: int | None) -> None:
        """Report that the script begins its loop after `step`. `loaded`: step of the script's checkpoint, if known."""
        self._set(step)
        self.link.event("begun", rank=self.rank, step=step, **({"loaded": loaded} if loaded else {}))
        self._run.expect_step(step + 1)

    def end_step(self, began: float) -> None:
        """Report the next step as made. `began`: its start, on the monotonic clock."""
        self._set(self.step + 1)
        self.link.event("step", rank=self.rank, step=self.step, began=began)
        self._run.expect_step(self.step + 1)

    def saved(self, path: str, step: int) -> None:
        """Report that the script has saved `step` at `path`."""
        self.link.event("script_saved", rank=self.rank, step=step, path=path)

    def _set(self, step: int) -> None:
        self.step = self._run.step = step
        _, by_all = self.steps.get()
        self.steps.set(step, min(by_all, step))

    def resume_after(self, step: int) -> None:
        """Note that all ranks have saved `step`, and no later one."""
        self.step = self._run.step = step
        made, _ = self.steps.get()
        self.steps.set(made, step)

    def set_aside(self, paths: Sequence[str]) -> None:
        """Report this rank's saves that were set aside."""
        self.link.event("saves_set_aside", rank=self.rank, step=self.step, paths=[*paths])
