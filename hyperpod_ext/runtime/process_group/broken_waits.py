"""Which collectives have raised: a training function may swallow the error, and go on with half a sum.

Python code waits for a collective in `Work.wait`, whether it was begun with `async_op=True` or not. DDP's backward
pass waits in C++, and its forward pass where it brings buffers to all ranks, or lays out its buckets: what raises there
comes out of the functions that `_PLACES` names.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_dist: Any = dist  # some of it has no types
_PLACES: tuple[tuple[Any, str], ...] = (
    (dist.Work, "wait"),
    (torch.autograd, "backward"),
    (torch.autograd, "grad"),
    (dist, "_broadcast_coalesced"),
    (_dist.Reducer, "_rebuild_buckets"),
)
"""Whose errors are noted: a class or module, and the name of its function."""
_raised: list[str] = []
"""Words of the first error since `forget`, if there was one."""


def watch(is_broken: Callable[[BaseException], bool]) -> None:
    """Note from now on what these raise in the main thread that is an end of a connection. Once a process."""
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
    """What the first of them raised; empty: none has."""
    return _raised[0] if _raised else ""


def forget() -> None:
    """What was raised is of a generation that is over."""
    _raised.clear()
