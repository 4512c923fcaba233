"""Context managers that delay Ctrl-C and SIGTERM until the program can handle them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def held_back() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of the `with` block, which then raises KeyboardInterrupt. Programs that
    are started in the block receive the signals as usual."""
    came = False

    def note(_signum: int, _frame: object) -> None:
        nonlocal came
        came = True

    before = _handled_by(note)
    try:
        yield
    finally:
        _handle_as(before)
    if came:
        raise KeyboardInterrupt


@contextmanager
def remembered() -> Iterator[Callable[[], None]]:
    """Raise KeyboardInterrupt for SIGINT and SIGTERM in the `with` block.

    Python ignores exceptions of signal handlers in some places, such as import callbacks and `__del__`, so that a
    KeyboardInterrupt can be lost.

    Yields:
        A function to call regularly, which raises KeyboardInterrupt again if a signal has arrived in the block.
    """
    came = False

    def interrupt(_signum: int, _frame: object) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    before = _handled_by(interrupt)
    try:
        yield check
    finally:
        _handle_as(before)


def _handled_by(handler: Callable[[int, FrameType | None], object]) -> dict[int, Any]:
    """Install `handler` for SIGINT and SIGTERM, and return the previous handlers."""
    return {signum: signal.signal(signum, handler) for signum in (signal.SIGINT, signal.SIGTERM)}


def _handle_as(before: dict[int, Any]) -> None:
    for signum, handler in before.items():
        signal.signal(signum, handler)
