"""A worker's heartbeat: some bytes of shared memory that say what it is doing right now.

The worker writes them without a system call or a message, at each change of phase; its agent reads them
whenever it wants to know, even when the worker is stopped, hangs or is dead. Imports nothing heavy.
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
_MARK = struct.Struct("<QQQQd")  # marks, generation, step, phase, when
_BEAT = struct.Struct("<Qd")  # collectives, when
_BEAT_AT = 64  # a cache line of its own: two threads write
_ORDERS_AT = 128
_BYTES = mmap.PAGESIZE


class Phase(IntEnum):
    """What a rank does, in the order of a step. Who waits for others in a collective is further than they are."""

    START = 0
    """Building, restoring, and whatever else comes before the first step."""
    DATA = 1
    FORWARD = 2
    """The forward pass and the loss."""
    BACKWARD = 3
    """The backward pass, with the all-reduce of gradients beside it."""
    OPTIMIZER = 4
    REST = 5
    """What is left of the step: schedules, logging."""
    CHECKPOINT = 6
    """The step is committed, and a snapshot of it begun."""
    AFTER = 7
    """What follows the last step."""
    DONE = 8
    """The training function has returned; the others have not."""
    AWAY = 9
    """Between generations."""

    @property
    def word(self) -> str:
        return self.name.lower()


IN_STEP = frozenset({Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.REST, Phase.CHECKPOINT})
"""Phases of a step that is being made: here progress is expected."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A heartbeat, as it was read."""

    marks: int
    """Changes of phase so far; 0: none yet."""
    generation: int
    step: int
    """Step that is being made."""
    phase: Phase
    marked_at: float
    """When the phase changed last, on the machine's monotonic clock."""
    collectives: int
    """Collective operations that this rank has begun in its generation."""
    beat_at: float
    """When the process last had Python's lock for a moment."""


class HeartbeatPage:
    """The shared page of one worker. One process writes, its agent reads."""

    def __init__(self, page: mmap.mmap, path: str = "") -> None:
        self._page, self.path = page, path
        self._marks = _MARK.unpack_from(page, 0)[0]
        self.generation, self.step, self.phase = 0, 0, Phase.START

    @classmethod
    def create(cls, path: Path) -> HeartbeatPage:
        """A fresh page at `path`, in a folder that is private to this user. A former process keeps the old one.

        On a full or broken disk it is memory without a name, at another `path`: a page of a file that the disk has no
        room for would end with SIGBUS each process that touches it.
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
        """The page that an agent made for this process; without one, a page that nobody reads."""
        if path is None:
            return cls(mmap.mmap(-1, _BYTES))
        descriptor = os.open(path, os.O_RDWR)
        try:
            return cls(mmap.mmap(descriptor, _BYTES))
        finally:
            os.close(descriptor)

    def mark(self, phase: Phase) -> None:
        """The worker has come to `phase`. Costs less than a microsecond."""
        self.phase = phase
        self._marks += 1
        _MARK.pack_into(self._page, 0, self._marks, self.generation, self.step, phase, time.monotonic())

    def beat(self, collectives: int) -> None:
        """The process runs Python code."""
        _BEAT.pack_into(self._page, _BEAT_AT, collectives, time.monotonic())

    def read(self) -> Reading:
        """What the page says now."""
        marks, generation, step, phase, marked_at = _MARK.unpack_from(self._page, 0)
        collectives, beat_at = _BEAT.unpack_from(self._page, _BEAT_AT)
        known = Phase(phase) if phase in Phase._value2member_map_ else Phase.START
        return Reading(marks, generation, step, known, marked_at, collectives, beat_at)

    def order(self) -> None:
        """Tell the worker that there are orders for it; it looks at its next change of phase."""
        self._page[_ORDERS_AT] = (self._page[_ORDERS_AT] + 1) % 256

    @property
    def orders(self) -> int:
        """Changes whenever there are new orders."""
        return self._page[_ORDERS_AT]
