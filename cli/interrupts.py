"""Ctrl-C, kept until it can be acted on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Interrupt:
    """Whether Ctrl-C was pressed."""

    came: bool = False


@contextmanager
def held_back() -> Iterator[Interrupt]:
    """Note Ctrl-C instead of raising it. Programs started meanwhile are not affected."""
    interrupt = Interrupt()

    def note(_signum: int, _frame: object) -> None:
        interrupt.came = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
