"""Shows the progress of a transfer on stderr: as a bar on a terminal, otherwise as a line every 30 seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..output import console, say
from .table import size

_LINE_S = 30.0


@contextmanager
def transfer(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of a transfer of `total` bytes.

    Yields:
        A function that the caller calls after each part of the transfer, from any thread, with the number of bytes in
        the part.
    """
    if not sys.stderr.isatty():
        yield _Lines(label, total).count
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    shown = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*shown, TimeRemainingColumn(), console=console(sys.stderr), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


class _Lines:
    def __init__(self, label: str, total: int) -> None:
        self._label, self._total = label, total
        self._done, self._shown_at = 0, time.monotonic()
        self._lock = threading.Lock()

    def count(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if time.monotonic() - self._shown_at > _LINE_S:
                self._shown_at = time.monotonic()
                say(f"{self._label}: {size(self._done)} of {size(self._total)}")
