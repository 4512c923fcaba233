"""Ctrl-C, kept until it can be acted on."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
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

    before = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield check
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
