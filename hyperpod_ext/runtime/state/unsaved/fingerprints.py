"""Compute fingerprints of values that a script may keep from step to step, to detect their changes."""

from __future__ import annotations

import ctypes
import operator
import sys
import time
import zlib
from collections.abc import Hashable, Set
from types import GeneratorType
from typing import Any

import torch

from hyperpod_ext.runtime.snapshot.image import local_of
from hyperpod_ext.runtime.state.unsaved.carried import carried, iterated

_WINDOW = 64 << 10
"""Number of bytes that a fingerprint reads at each of a tensor's beginning, middle and end."""
_NEAR_S, _NEAR = 600.0, 0.1
"""A number counts as a time if its distance from a clock is less than this many seconds, and less than this fraction of
the clock's value. The fraction matters soon after a boot, when the monotonic clock is as small as most numbers of a
script."""
_last_look = time.monotonic()
"""Monotonic time of the last comparison. A number between this time and now counts as a time, even in a long step."""
_MOST = 100
"""Maximum number of items of a tuple that is compared."""


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 without storage, as for FSDP2's unsharded parameters between uses."""
    local = local_of(tensor)
    if type(local) is not torch.Tensor:
        return 0
    if local.layout != torch.strided or local.is_meta:
        return 0
    storage = local.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else 0


def of_tensor(tensor: torch.Tensor) -> Hashable:
    """Return a fingerprint of a tensor: its shape and a checksum.

    On a GPU the fingerprint is autograd's version counter, because reading values would wait for queued work. For a
    tensor that is not contiguous, the fingerprint is also the counter.
    """
    local = local_of(tensor)
    if local.device.type != "cpu" or not local.is_contiguous():
        return -1 if tensor.is_inference() else tensor._version
    nbytes, first = local.numel() * local.element_size(), local.data_ptr()
    starts = sorted({0, max(0, nbytes // 2 - _WINDOW // 2), max(0, nbytes - _WINDOW)})
    checksum = 0
    for start in starts:
        checksum = zlib.crc32(ctypes.string_at(first + start, min(_WINDOW, nbytes - start)), checksum)
    return (tuple(local.shape), checksum)


def of_array(array: Any) -> Hashable:
    return zlib.crc32(array.ravel()[: _WINDOW // 8].tobytes())


def is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.size > 1 and value.dtype != object


def end_look() -> None:
    """Record that a comparison has just ended, so that later clock readings in variables are recognized as times."""
    global _last_look
    _last_look = time.monotonic()


def is_number(value: Any) -> bool:
    """Return whether `value` is a number that is probably not the time of a clock."""
    return type(value) is int or (type(value) is float and not _is_time(value))


def of_plain(value: Any, saved: Set[int]) -> Hashable:
    """Return a fingerprint of a number, tensor, array, or tuple of these; None for a value of another type.

    A list or dict is represented by its identity. If the values of a tensor are not read, the tensor is represented by
    its identity and version counter, because a later tensor may have the same counter.

    Args:
        value: the present value of a variable or attribute.
        saved: storage addresses of the tensors in snapshots. The result is None for a tensor that is in snapshots.
    """
    if is_number(value) or value is None:
        return (type(value), value)
    if isinstance(value, torch.Tensor):
        if not (address := address_of(value)) or address in saved:
            return None
        mark = of_tensor(value)
        return (mark, id(value)) if isinstance(mark, int) else mark
    if is_array(value):
        return of_array(value)
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "size", 0) == 1:
        return of_plain(value.item(), saved)
    if type(value) is tuple and len(value) <= _MOST:
        inner = tuple(of_plain(each, saved) for each in value)
        return inner if any(each is not None for each in inner) else None
    if type(value) in (list, dict):
        return (type(value), id(value))  # `kinds.py` compares the contents of lists and dicts
    return None


def of_iterator(iterator: Any, saved: Set[int]) -> Hashable:
    """Return a fingerprint of an iterator's position; always the same if the position cannot be read.

    Args:
        iterator: the iterator, which is not advanced.
        saved: storage addresses of the tensors in snapshots.
    """
    found: list[Hashable] = []
    for each in iterated(iterator):
        if isinstance(each, GeneratorType):
            own = carried(each.gi_frame) if each.gi_frame is not None and not each.gi_running else []
            found += [(name, mark) for name, value in own if (mark := of_plain(value, saved)) is not None]
        elif type(each).__module__ == "builtins" and (left := operator.length_hint(each, -1)) >= 0:
            found.append(left)
        elif type(getattr(each, "__dict__", None)) is dict:
            found += [(name, value) for name, value in vars(each).items() if type(value) is int]
    return tuple(found)


def _is_time(value: float) -> bool:
    clocks = time.time(), time.monotonic()
    near = any(abs(value - now) < min(_NEAR_S, _NEAR * now) for now in clocks)
    return near or _last_look <= value <= clocks[1]
