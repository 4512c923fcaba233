"""Delays Ctrl-C and SIGTERM until they can be handled."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def held_back() -> Iterator[None]:
    """Raise KeyboardInterrupt for Ctrl-C or SIGTERM after the block, not in it. Programs started in the block are not
    affected."""
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
    """Raise KeyboardInterrupt for SIGINT and SIGTERM in the block. The yielded function raises it again if it was lost.

    Python ignores exceptions of signal handlers in some places, such as callbacks of imports and `__del__`.
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
    """Set `handler` for both signals, and return the handlers before."""
    return {signum: signal.signal(signum, handler) for signum in (signal.SIGINT, signal.SIGTERM)}


def _handle_as(before: dict[int, Any]) -> None:
    for signum, handler in before.items():
        signal.signal(signum, handler)
