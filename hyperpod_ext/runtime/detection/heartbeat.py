"""A worker's heartbeat: a page of shared memory with the worker's present step and phase.

The worker writes its page at each change of phase, without a system call or a message. The agent can read the page at
any time, even if the worker is stopped, hung or dead. This module imports no heavy modules.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import weakref
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

ENV_HEARTBEAT = "HPX_HEARTBEAT"
_MARK = struct.Struct("<QQQQd")
"""Number of changes of phase, generation, step, phase, and time of the last change of phase."""
_BEAT = struct.Struct("<Qd")
"""Number of collectives, and time at which the process last had the GIL."""
_BEAT_AT = 64
"""Offset of `_BEAT` in the page, in another cache line than `_MARK`, because another thread writes it."""
_ORDERS_AT = 128
_UNPROTECTED = struct.Struct("<Qd")
"""Rank + 1 and time of an optimizer step that no checkpoint saves; zeros if there was none."""
_UNPROTECTED_AT = 192
_BYTES = mmap.PAGESIZE


class Phase(IntEnum):
    """Activities of a rank, in the order of a step. A rank that waits in a collective has made more progress than the
    ranks for which it waits."""

    START = 0
    """Time before the first step, for example to build the model and restore."""
    DATA = 1
    FORWARD = 2
    """The forward pass and the computation of the loss."""
    BACKWARD = 3
    """The backward pass, during which gradients are all-reduced."""
    OPTIMIZER = 4
    REST = 5
    """The rest of a step, for example schedules and logging."""
    CHECKPOINT = 6
    """Committing the step, and starting its snapshot."""
    AFTER = 7
    """Time after the last step, in the training function."""
    DONE = 8
    """The training function has returned, but other ranks are not done yet."""
    AWAY = 9
    """Time between two generations."""

    @property
    def word(self) -> str:
        return self.name.lower()


IN_STEP = frozenset({Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.REST, Phase.CHECKPOINT})
"""Phases inside a step. A rank inside a step should make progress."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The contents of a heartbeat page at one moment."""

    marks: int
    """Number of changes of phase so far; 0 before the first change."""
    generation: int
    step: int
    """Number of the step that the rank is making."""
    phase: Phase
    marked_at: float
    """Time of the last change of phase, in seconds of the machine's monotonic clock."""
    collectives: int
    """Number of collectives that this rank has begun in its generation."""
    beat_at: float
    """Time at which the process last had the GIL, in seconds of the machine's monotonic clock."""


class HeartbeatPage:
    """The shared page of one worker. The worker writes to the page, and the worker's agent reads the page."""

    def __init__(self, page: mmap.mmap, path: str = "") -> None:
        self._page, self.path = page, path
        self._marks = _MARK.unpack_from(page, 0)[0]
        self.generation, self.step, self.phase = 0, 0, Phase.START

    @classmethod
    def create(cls, path: Path) -> HeartbeatPage:
        """Create a page as the file `path`, in a private folder of this user. An earlier process at this path keeps its
        page.

        If the disk is full or broken, the page is anonymous memory with another `path`, because using the page of a
        file without disk space would raise SIGBUS.
        """
        try:
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, _BYTES)
                return cls(mmap.mmap(descriptor, _BYTES), str(path))
            finally:
                os.close(descriptor)
        except OSError:
            return cls._without_file()

    @classmethod
    def _without_file(cls) -> HeartbeatPage:
        descriptor = os.memfd_create("heartbeat", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _BYTES)
        page = cls(mmap.mmap(descriptor, _BYTES), f"/proc/{os.getpid()}/fd/{descriptor}")
        weakref.finalize(page, os.close, descriptor)
        return page

    @classmethod
    def of(cls, path: str | None) -> HeartbeatPage:
        """Open the page that the agent has made for this process, or without a path, make an unshared page."""
        if path is None:
            return cls(mmap.mmap(-1, _BYTES))
        descriptor = os.open(path, os.O_RDWR)
        try:
            return cls(mmap.mmap(descriptor, _BYTES))
        finally:
            os.close(descriptor)

    def mark(self, phase: Phase) -> None:
        """Record that the worker has entered `phase`. The call takes less than a microsecond."""
        self.phase = phase
        self._marks += 1
        _MARK.pack_into(self._page, 0, self._marks, self.generation, self.step, phase, time.monotonic())

    def beat(self, collectives: int) -> None:
        """Record that the process is running Python code, and how many collectives it has begun."""
        _BEAT.pack_into(self._page, _BEAT_AT, collectives, time.monotonic())

    def read(self) -> Reading:
        """Return the present contents of the page."""
        marks, generation, step, phase, marked_at = _MARK.unpack_from(self._page, 0)
        collectives, beat_at = _BEAT.unpack_from(self._page, _BEAT_AT)
        known = Phase(phase) if phase in Phase._value2member_map_ else Phase.START
        return Reading(marks, generation, step, known, marked_at, collectives, beat_at)

    def report_unprotected(self, rank: int) -> None:
        """Record that `rank` makes an optimizer step that no checkpoint saves."""
        _UNPROTECTED.pack_into(self._page, _UNPROTECTED_AT, rank + 1, time.monotonic())

    @property
    def unprotected(self) -> tuple[int, float] | None:
        """Rank and time of the last optimizer step that no checkpoint saves; None if there was none."""
        number, when = _UNPROTECTED.unpack_from(self._page, _UNPROTECTED_AT)
        return (number - 1, when) if number else None

    def order(self) -> None:
        """Announce to the worker that it has orders to read, which it does at its next change of phase."""
        self._page[_ORDERS_AT] = (self._page[_ORDERS_AT] + 1) % 256

    @property
    def orders(self) -> int:
        """A number from 0 to 255 that changes each time the worker gets new orders."""
        return self._page[_ORDERS_AT]
