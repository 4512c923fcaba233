"""Ctrl-C, kept until it can be acted on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_back() -> Iterator[None]:
    """Raise Ctrl-C when the block is over instead of in it. Programs started meanwhile are not affected."""
    came = False

    def note(_signum: int, _frame: object) -> None:
        nonlocal came
        came = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
