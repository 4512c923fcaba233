"""Records errors of collectives, because a training function may catch an error and continue with partial sums.

Python code waits for a collective in `Work.wait`, both with and without `async_op=True`. DDP waits in C++: in its
backward pass, and in its forward pass when it broadcasts buffers or rebuilds its buckets. The functions in `_PLACES`
other than `Work.wait` raise the errors of DDP's waits.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_dist: Any = dist  # Any, because some private names have no types
_PLACES: tuple[tuple[Any, str], ...] = (
    (dist.Work, "wait"),
    (torch.autograd, "backward"),
    (torch.autograd, "grad"),
    (dist, "_broadcast_coalesced"),
    (_dist.Reducer, "_rebuild_buckets"),
)
"""Functions whose errors are recorded: the class or module, and the function's name."""
_raised: list[str] = []
"""At most one entry: the message of the first error since `forget`."""


def watch(is_broken: Callable[[BaseException], bool]) -> None:
    """Start to record connection errors that the functions in `_PLACES` raise in the main thread. Call only once."""
    for holder, name in _PLACES:
        original = getattr(holder, name)
        if not hasattr(original, "__wrapped__"):
            setattr(holder, name, _noting(original, is_broken))


def _noting(original: Any, is_broken: Callable[[BaseException], bool]) -> Any:
    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return original(*arguments, **options)
        except Exception as error:
            ended = isinstance(error, ConnectionError) or is_broken(error)
            if ended and not _raised and threading.current_thread() is threading.main_thread():
                _raised.append(str(error))
            raise

    return call


def first() -> str:
    """Return the message of the first recorded error; empty if no error is recorded."""
    return _raised[0] if _raised else ""


def forget() -> None:
    """Drop the recorded error, because its generation has ended."""
    _raised.clear()
