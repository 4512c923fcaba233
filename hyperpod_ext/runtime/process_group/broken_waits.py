"""Which waits for collectives have raised: a training function may swallow the error, and go on with half a sum.

Python code waits for a collective in `Work.wait`, whether it was begun with `async_op=True` or not. What C++ waits for,
as DDP's backward pass does, raises from there, and is not seen here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_raised: list[str] = []
"""Words of the first error since `forget`, if there was one."""


def watch(is_broken: Callable[[BaseException], bool]) -> None:
    """Note from now on what waits of the main thread raise that is an end of a connection. Once a process."""
    kind: Any = dist.Work
    original = kind.wait
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def wait(work: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return original(work, *arguments, **options)
        except Exception as error:
            ended = isinstance(error, ConnectionError) or is_broken(error)
            if ended and not _raised and threading.current_thread() is threading.main_thread():
                _raised.append(str(error))
            raise

    kind.wait = wait


def first() -> str:
    """What the first of them raised; empty: none has."""
    return _raised[0] if _raised else ""


def forget() -> None:
    """What was raised is of a generation that is over."""
    _raised.clear()
