"""Shows the progress of a job on stderr: as a live bar on a terminal, otherwise as a few lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from hyperpod_ext.terminal import escape

from ..output import console, say
from ..report.event_text import EventText

if TYPE_CHECKING:
    import rich.progress

    from hyperpod_ext.jobs.contract.job_status import StatusUpdate

_LINES_A_RUN = 8


class ProgressDisplay(Protocol):
    """Interface of a display that shows the progress of a job."""

    def show(self, update: StatusUpdate) -> None:
        """Show one update of the job's status."""


@contextmanager
def make_progress() -> Iterator[ProgressDisplay]:
    """Yield a display with a live bar if stderr is a terminal, otherwise a display that prints lines."""
    if not sys.stderr.isatty():
        yield PlainProgress()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))
    with Bar(*shown, TimeElapsedColumn(), console=console(sys.stderr)) as bar:
        yield BarProgress(bar)


class PlainProgress:
    """Display that prints one line for each event, and for about eight steps of each run."""

    def __init__(self) -> None:
        self._event_text = EventText()
        self._shown = (self._event_text.run, 0)

    def show(self, update: StatusUpdate) -> None:
        """Print the events of the update, and some of its steps."""
        for line in update.lines:
            say(line)
        for event in update.events:
            for line in self._event_text.tell(event):
                say(line)
            self._say_step()

    def _say_step(self) -> None:
        event_text = self._event_text
        run, step = self._shown if self._shown[0] == event_text.run else (event_text.run, 0)
        due = step + max((event_text.of or step) // _LINES_A_RUN, 1)
        if event_text.step >= due or (event_text.step == event_text.of and event_text.step > step):
            of = f" of {event_text.of}" if event_text.of else ""
            say(f"step {event_text.step}{of}{_loss(event_text)}")
            step = event_text.step
        self._shown = (run, step)


class BarProgress:
    """Display that draws one bar for each run, and prints the events above the bars."""

    def __init__(self, bar: rich.progress.Progress) -> None:
        self._bar = bar
        self._event_text = EventText()
        self._tasks: dict[str, rich.progress.TaskID] = {}

    def show(self, update: StatusUpdate) -> None:
        """Print the events of the status update, and advance the progress bar."""
        for line in update.lines:
            self._bar.console.print(escape(line), markup=False, highlight=False)
        for event in update.events:
            if event["run"] != self._event_text.run:
                self._move()  # show the last step of the previous run before its bar stops
            for line in self._event_text.tell(event):
                self._bar.console.print(escape(line), markup=False, highlight=False)
        self._move()

    def _move(self) -> None:
        event_text = self._event_text
        if event_text.run not in self._tasks:
            label = "training" if event_text.run == "main" else "undisturbed"
            self._tasks[event_text.run] = self._bar.add_task(label, total=None, loss="")
        self._bar.update(
            self._tasks[event_text.run], completed=event_text.step, total=event_text.of, loss=_loss(event_text, "")
        )


def _loss(event_text: EventText, before: str = ", ") -> str:
    return "" if event_text.loss is None else f"{before}loss {event_text.loss:.4f}"
