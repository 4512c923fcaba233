"""Copy a state in the background during a step's forward and backward pass, and compute its checksum in the same pass.

A background copy slows training mainly by its use of memory bandwidth and caches, not by its use of a core. So the copy
bypasses the caches, and reads memory only once for both copy and checksum. If the copy did not compute the checksum,
the memory server would read all copied bytes again to compute it.
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
"""If a plain copy takes fewer seconds than this, it slows a step too little to need a copy with checksum."""
_ROOM = 4.0
"""A copy with checksum is tried only if the available time is at least this many times the time of a plain copy. A copy
with checksum may take twice as long as a plain copy, and a step may be shorter than usual."""
_MARGIN = 1.5
"""Once a copy with checksum was measured, the available time must also be at least this many times its measured time. A
copy with checksum uses one core; a plain copy may use several cores."""
_FORGET = 0.9
"""After each plain copy, the measured time of a copy with checksum is multiplied by this factor. The factor is below 1,
so that a copy with checksum is tried again after some saves."""
_TELLS = 8
"""The time of a copy with checksum is recorded only if at least one in this many bytes was copied before its end."""
_WINDOWS = 4
"""Number of last saves whose available times are considered."""


def has_room(copy_s: float, overlapped_s: float | None, window_s: float) -> bool:
    """Return whether a copy with checksum is worthwhile and probably ends before the caller waits for it.

    Args:
        copy_s: seconds of a plain copy.
        overlapped_s: seconds of a copy with checksum; None: not measured yet.
        window_s: seconds from the start of a copy until the caller waits for it.
    """
    least = _ROOM * copy_s if overlapped_s is None else max(_ROOM * copy_s, _MARGIN * overlapped_s)
    return copy_s >= _WORTH_S and window_s >= least


class Room:
    """Decides from the times of earlier saves whether there is time for a copy with checksum."""

    def __init__(self) -> None:
        self._copy_s: float | None = None
        self._overlapped_s: float | None = None
        self._windows: deque[float] = deque(maxlen=_WINDOWS)

    def copied(self, seconds: float) -> None:
        """Record the seconds of a copy without checksum."""
        self._copy_s = seconds if self._copy_s is None else min(seconds, self._copy_s)
        self._overlapped_s = None if self._overlapped_s is None else _FORGET * self._overlapped_s

    def copied_overlapped(self, seconds: float, nbytes: int, of: int) -> None:
        """Record the seconds of a copy with checksum that ended after `nbytes` of the `of` bytes of a snapshot."""
        if nbytes * _TELLS >= of:
            self._overlapped_s = seconds * of / nbytes

    def waited(self, seconds: float) -> None:
        """Record the seconds from the start of a copy until the caller waited for it."""
        self._windows.append(seconds)

    def enough(self) -> bool:
        """Return whether the next copy should compute the checksum, according to `has_room` and the recorded times."""
        if self._copy_s is None or not self._windows:
            return False
        return has_room(self._copy_s, self._overlapped_s, min(self._windows))


class CopyProgress(NamedTuple):
    """The part of a snapshot that is complete when a copy ends, perhaps early."""

    items: int
    """Number of items that are completely copied. Items are copied in the order of the layout."""
    nbytes: int
    """Number of bytes, from the start of the snapshot, that are complete."""
    checksum: int
    """CRC64-NVME of the first `nbytes` bytes of the snapshot."""


class OverlappedCopy:
    """Copies a state into a slot (memory for one snapshot), and computes the checksum of the copied bytes. One object
    can be used for many saves into the same slot.

    Args:
        plan: layout of the snapshot.
        sources: the live tensor of each item of the plan, on the CPU.
        destinations: the tensor of each item in the slot.
        image: bytes of the whole snapshot in the slot. The bytes around the tensors' values are already written.
        copied: indices of items that are already copied, and of which only the checksum is computed.
        first: index of the first item to copy.
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
        self._memory = [*sources], image  # keep the tensors alive, so that their addresses stay valid
        self._scattered: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Destination and source of each tensor that is not contiguous memory, which torch must copy first."""
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
        """Copy the present values of the tensors, and return the progress of the copy.

        Args:
            unthrottle: once it is set, the copy ends early.
            before: number of bytes before the first item to copy, and their CRC64-NVME.
        """
        for destination, source in self._scattered:
            if not unthrottle.is_set():
                copy(destination, source)
        nbytes, checksum = copy_pieces_checked(self._pieces, before[1], unthrottle)
        nbytes += before[0]
        return CopyProgress(bisect_right(self._ends, nbytes), nbytes, checksum)
