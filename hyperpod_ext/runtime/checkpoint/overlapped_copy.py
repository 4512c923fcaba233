"""Copies beside a forward and backward pass that cost it as little as can be, with their checksum taken on the way.

What a copy takes from a step beside it is memory's and caches' time, not its core's. So pieces are copied past the
caches, and their checksum is taken while they are read: a seal would read all of memory once more.
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
"""A copy that lasts less costs a step nothing that could be saved."""
_ROOM = 4.0
"""Copies that there must be time for before it is tried. With its checksum one takes up to two, and a step shorter than
those before it must not have to wait."""
_MARGIN = 1.5
"""And as many of those with their checksum, once one was made: it takes one core, and a plain copy may take several."""
_FORGET = 0.9
"""Of that time, after each copy without: what was slow once is tried again."""
_TELLS = 8
"""Less than one part in so many of a copy does not tell how long all of it takes."""
_WINDOWS = 4


def has_room(copy_s: float, overlapped_s: float | None, window_s: float) -> bool:
    """Whether the checksum can be taken on the way.

    Args:
        copy_s: how long a copy lasts alone.
        overlapped_s: and with its checksum, if one was made.
        window_s: after so long it is waited for.
    """
    least = _ROOM * copy_s if overlapped_s is None else max(_ROOM * copy_s, _MARGIN * overlapped_s)
    return copy_s >= _WORTH_S and window_s >= least


class Room:
    """Learns from the saves before how much time there is."""

    def __init__(self) -> None:
        self._copy_s: float | None = None
        self._overlapped_s: float | None = None
        self._windows: deque[float] = deque(maxlen=_WINDOWS)

    def copied(self, seconds: float) -> None:
        """So long a copy without checksum took."""
        self._copy_s = seconds if self._copy_s is None else min(seconds, self._copy_s)
        self._overlapped_s = None if self._overlapped_s is None else _FORGET * self._overlapped_s

    def copied_overlapped(self, seconds: float, nbytes: int, of: int) -> None:
        """So long one with its checksum took for `nbytes`, as many as it came to."""
        if nbytes * _TELLS >= of:
            self._overlapped_s = seconds * of / nbytes

    def waited(self, seconds: float) -> None:
        """So long after its beginning a copy was waited for."""
        self._windows.append(seconds)

    def enough(self) -> bool:
        """See `has_room`."""
        if self._copy_s is None or not self._windows:
            return False
        return has_room(self._copy_s, self._overlapped_s, min(self._windows))


class CopyProgress(NamedTuple):
    """How far a copy came."""

    items: int
    """From the first on, whole."""
    nbytes: int
    checksum: int
    """CRC64-NVME of so many bytes of the image, from its start."""


class OverlappedCopy:
    """Copies a state into its image, with the checksum, save after save; where its pieces lie is looked up once. The
    thread that trains waits meanwhile for the interpreter's lock, as often as it needs that.

    Args:
        sources, destinations: one an item of the plan, all on the CPU.
        image: from its first byte on; its frames are written.
        first: items before this one are left out.
        copied: items that are in the image already.
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
        self._memory = [*sources], image  # kept, as addresses in it are
        self._scattered: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Destinations and sources of those that are copied beforehand, as torch copies them."""
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
        """Copy what is there now; ends early once `unthrottle` is set.

        Args:
            before: bytes of the image before the first item that is copied, and their CRC64-NVME.
        """
        for destination, source in self._scattered:
            if not unthrottle.is_set():
                copy(destination, source)
        nbytes, checksum = copy_pieces_checked(self._pieces, before[1], unthrottle)
        nbytes += before[0]
        return CopyProgress(bisect_right(self._ends, nbytes), nbytes, checksum)
