"""Progress of a job on stderr: a live bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from ..output import say
from ..report.story import Story

if TYPE_CHECKING:
    import rich.progress

    from hyperpod_ext.submit.contract.job_status import Moment

_LINES_A_RUN = 8


class Progress(Protocol):
    """Shows moments."""

    def show(self, moment: Moment) -> None:
        """Show what is new."""


@contextmanager
def make_progress() -> Iterator[Progress]:
    """What fits where stderr goes."""
    if not sys.stderr.isatty():
        yield PlainProgress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))
    with Bar(*shown, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        yield BarProgress(bar)


class PlainProgress:
    """Whole lines only, a few for each run."""

    def __init__(self) -> None:
        self._story = Story()
        self._said = (self._story.run, 0)

    def show(self, moment: Moment) -> None:
        """Say the events, and the step now and then."""
        for line in moment.lines:
            say(line)
        for event in moment.events:
            for line in self._story.tell(event):
                say(line)
            self._say_step()

    def _say_step(self) -> None:
        story = self._story
        run, step = self._said if self._said[0] == story.run else (story.run, 0)
        due = step + max((story.of or 0) // _LINES_A_RUN, 1)
        if story.step >= due or (story.step == story.of and story.step > step):
            say(f"step {story.step} of {story.of or '?'}{_loss(story)}")
            step = story.step
        self._said = (run, step)


class BarProgress:
    """One bar a run; events scroll by above it."""

    def __init__(self, bar: rich.progress.Progress) -> None:
        self._bar = bar
        self._story = Story()
        self._tasks: dict[str, rich.progress.TaskID] = {}

    def show(self, moment: Moment) -> None:
        """Print what is worth a line, and move the bar."""
        for line in moment.lines:
            self._bar.console.print(line, markup=False, highlight=False)
        for event in moment.events:
            if event["run"] != self._story.run:
                self._move()  # to where the run before it ended
            for line in self._story.tell(event):
                self._bar.console.print(line, markup=False, highlight=False)
        self._move()

    def _move(self) -> None:
        story = self._story
        if story.run not in self._tasks:
            label = "training" if story.run == "main" else "undisturbed"
            self._tasks[story.run] = self._bar.add_task(label, total=None, loss="")
        self._bar.update(self._tasks[story.run], completed=story.step, total=story.of, loss=_loss(story, ""))


def _loss(story: Story, before: str = ", ") -> str:
    return "" if story.loss is None else f"{before}loss {story.loss:.4f}"
