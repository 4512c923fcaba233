"""Copies during a forward and backward pass at the least cost, with the checksum in the same pass.

A background copy slows a step by its use of memory and caches, not of its core. So pieces are copied without the
caches, and their checksum is computed from the same read: a seal would read all of the memory once more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from hyperpod_ext.runtime.snapshot.fast_copy import (
    Unthrottle,
    address_of,
    copy,
    copy_pieces_checked,
    is_memory,
    pieces_of,
)
from hyperpod_ext.runtime.snapshot.layout_plan import Plan

_WORTH_S = 0.005
"""Shorter copies cost a step too little to optimize."""
_ROOM = 4.0
"""Time needed before a checksum is tried, in copies. With its checksum a copy takes up to twice as long, and a shorter
step must not have to wait."""
_MARGIN = 1.5
"""The same in copies with checksum, once one was measured: it uses one core, a plain copy may use several."""
_FORGET = 0.9
"""Factor on the measured time after each copy without checksum, so that a slow one is tried again."""
_TELLS = 8
"""A measurement counts only if at least one part in so many was copied."""
_WINDOWS = 4


def has_room(copy_s: float, overlapped_s: float | None, window_s: float) -> bool:
    """Return whether the time suffices for a copy with checksum.

    Args:
        copy_s: duration of a plain copy.
        overlapped_s: duration of a copy with checksum, if measured.
        window_s: time until the caller waits for the copy.
    """
    least = _ROOM * copy_s if overlapped_s is None else max(_ROOM * copy_s, _MARGIN * overlapped_s)
    return copy_s >= _WORTH_S and window_s >= least


class Room:
    """Estimates the available time from earlier saves."""

    def __init__(self) -> None:
        self._copy_s: float | None = None
        self._overlapped_s: float | None = None
        self._windows: deque[float] = deque(maxlen=_WINDOWS)

    def copied(self, seconds: float) -> None:
        """Record the duration of a copy without checksum."""
        self._copy_s = seconds if self._copy_s is None else min(seconds, self._copy_s)
        self._overlapped_s = None if self._overlapped_s is None else _FORGET * self._overlapped_s

    def copied_overlapped(self, seconds: float, nbytes: int, of: int) -> None:
        """Record the duration of a copy with checksum of the first `nbytes` of `of`."""
        if nbytes * _TELLS >= of:
            self._overlapped_s = seconds * of / nbytes

    def waited(self, seconds: float) -> None:
        """Record the time from a copy's start until the caller waited for it."""
        self._windows.append(seconds)

    def enough(self) -> bool:
        """Return `has_room` for the recorded times."""
        if self._copy_s is None or not self._windows:
            return False
        return has_room(self._copy_s, self._overlapped_s, min(self._windows))


class CopyProgress(NamedTuple):
    """Progress of a copy."""

    items: int
    """Number of complete items, from the first."""
    nbytes: int
    checksum: int
    """CRC64-NVME of the first `nbytes` of the image."""


class OverlappedCopy:
    """Copies a state into its image, with the checksum, at each save; the pieces' addresses are computed once.

    Args:
        sources, destinations: one per item of the plan, all on the CPU.
        image: the whole image, with frames.
        first: items before this one are left out.
        copied: items that are already in the image.
    """

    def __init__(
        self,
        plan: Plan,
        sources: Sequence[torch.Tensor],
        destinations: Sequence[torch.Tensor],
        image: memoryview,
        copied: Collection[int],
        first: int = 0,
    ) -> None:
        self._memory = [*sources], image  # keeps the addresses valid
        self._scattered: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Destinations and sources of tensors that torch copies first."""
        begin, position = address_of(image), plan.items[first - 1].end if first else 0
        pieces: list[tuple[int, int, int]] = []
        for index, item in enumerate(plan.items[first:], first):
            source, destination = sources[index], destinations[index]
            frame = item.data - position
            if index not in copied and is_memory(source):
                pieces += (0, begin + position, frame), (destination.data_ptr(), source.data_ptr(), item.nbytes)
            else:
                if index not in copied:
                    self._scattered.append((destination, source))
                pieces.append((0, begin + position, frame + item.nbytes))
            position = item.data + item.nbytes
        self._pieces = pieces_of(pieces)
        self._ends = [item.data + item.nbytes for item in plan.items]

    def run(self, unthrottle: Unthrottle, before: tuple[int, int] = (0, 0)) -> CopyProgress:
        """Copy the present values; end early once `unthrottle` is set.

        Args:
            before: number of bytes before the first copied item, and their CRC64-NVME.
        """
        for destination, source in self._scattered:
            if not unthrottle.is_set():
                copy(destination, source)
        nbytes, checksum = copy_pieces_checked(self._pieces, before[1], unthrottle)
        nbytes += before[0]
        return CopyProgress(bisect_right(self._ends, nbytes), nbytes, checksum)
