"""Fingerprints of values that a script may keep from step to step."""

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
"""Bytes read at a tensor's beginning, middle and end."""
_NEAR_S, _NEAR = 600.0, 0.1
"""Largest distance of a number from a clock to count as a time: seconds, and share of the clock. After a boot the
monotonic clock is small, like most numbers of a training."""
_last_look = time.monotonic()
"""Time of the last comparison: clock values read since then count as times, for steps of any length."""
_MOST = 100
"""Maximum length of a compared tuple."""


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 without one, as for FSDP2's between two uses."""
    local = local_of(tensor)
    if type(local) is not torch.Tensor:
        return 0
    if local.layout != torch.strided or local.is_meta:
        return 0
    storage = local.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else 0


def of_tensor(tensor: torch.Tensor) -> Hashable:
    """Return a fingerprint of a tensor. On a device use the version: reading would wait for queued work."""
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
    """Record the time of a comparison, before the next step."""
    global _last_look
    _last_look = time.monotonic()


def is_number(value: Any) -> bool:
    """Return whether `value` is a number but not a time."""
    return type(value) is int or (type(value) is float and not _is_time(value))


def of_plain(value: Any, saved: Set[int]) -> Hashable:
    """Return a fingerprint of a value without identity, such as a number or an expression's tensor; None for others.

    Args:
        saved: addresses of tensors in snapshots.
    """
    if is_number(value) or value is None:
        return (type(value), value)
    if isinstance(value, torch.Tensor):
        return of_tensor(value) if address_of(value) and address_of(value) not in saved else None
    if is_array(value):
        return of_array(value)
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "size", 0) == 1:
        return of_plain(value.item(), saved)
    if type(value) is tuple and len(value) <= _MOST:
        inner = tuple(of_plain(each, saved) for each in value)
        return inner if any(each is not None for each in inner) else None
    if type(value) in (list, dict):
        return (type(value), id(value))  # changes in place are compared elsewhere
    return None


def of_iterator(iterator: Any, saved: Set[int]) -> Hashable:
    """Return a fingerprint of an iterator's progress; constant if the progress is invisible."""
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
