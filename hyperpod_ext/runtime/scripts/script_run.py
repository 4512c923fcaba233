"""One rank of a job whose script saves and loads its own checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hyperpod_ext.runtime.fault_injection.from_worker import run_dir_of
from hyperpod_ext.runtime.scripts.record import Steps
from hyperpod_ext.runtime.training.run import Run


class ScriptRun:
    """Reports a rank's steps and saves to the job, and stores its newest step in a file that outlives the process."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.rank = run.rank
        self.generation = run.generation
        self.link = run.link
        self.step = run.step
        """Newest step that the script has made; before its first step in this process, the newest step that all ranks
        have saved."""
        self.run_dir = run_dir_of()
        self.records = self.run_dir / "script-saves"
        self.steps = Steps(self.records / f"rank{run.rank}.steps")
        run.early_steps.end()

    def record_of(self, rank: int) -> Path:
        """Return the path of the file that records the saves of `rank`."""
        return self.records / f"rank{rank}.json"

    def begin(self, step: int, loaded: int | None) -> None:
        """Report that the script begins its loop after `step`.

        `loaded`: step of the checkpoint that the script has loaded; None or 0: unknown.
        """
        self._set(step)
        self.link.event("begun", rank=self.rank, step=step, **({"loaded": loaded} if loaded else {}))
        self._run.expect_step(step + 1)

    def end_step(self, began: float) -> None:
        """Report that the script has made the next step. `began`: start of the step, by `time.monotonic`."""
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
        """Record that `step` is the newest step that all ranks have saved."""
        self.step = self._run.step = step
        made, _ = self.steps.get()
        self.steps.set(made, step)

    def set_aside(self, paths: Sequence[str]) -> None:
        """Report the paths of this rank's saves that were moved away, because not all ranks have saved their step."""
        self.link.event("saves_set_aside", rank=self.rank, step=self.step, paths=[*paths])
