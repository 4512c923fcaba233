"""Ctrl-C, kept until it can be acted on."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def held_back() -> Iterator[None]:
    """Raise Ctrl-C, and SIGTERM as if it were that, when the block is over instead of in it. Programs started meanwhile
    are not affected."""
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
    """Have SIGINT and SIGTERM raise KeyboardInterrupt in the block, and remember it: what is yielded raises it again.

    Python ignores what a handler raises where nobody can catch it, as in the callbacks of imports and in `__del__`.
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
    """Both signals, with who had them before."""
    return {signum: signal.signal(signum, handler) for signum in (signal.SIGINT, signal.SIGTERM)}


def _handle_as(before: dict[int, Any]) -> None:
    for signum, handler in before.items():
        signal.signal(signum, handler)
