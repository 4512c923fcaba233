"""A worker's heartbeat: a few bytes of shared memory with its present step and phase.

At each change of phase, the worker writes its page without a system call or a message. The agent can read the page at
any time, even if the worker is stopped, hung or dead. Imports no heavy modules.
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
_BEAT_AT = 64  # in another cache line, because another thread writes it
_ORDERS_AT = 128
_UNPROTECTED = struct.Struct("<Qd")  # rank + 1, when
_UNPROTECTED_AT = 192
_BYTES = mmap.PAGESIZE


class Phase(IntEnum):
    """Activity of a rank, in the order of a step. A rank that waits in a collective is further than the other ranks."""

    START = 0
    """Everything before the first step, such as building and restoring."""
    DATA = 1
    FORWARD = 2
    """The forward pass and the loss."""
    BACKWARD = 3
    """The backward pass, overlapped with the all-reduce of gradients."""
    OPTIMIZER = 4
    REST = 5
    """The rest of the step, such as schedules and logging."""
    CHECKPOINT = 6
    """Committing the step, and starting the step's snapshot."""
    AFTER = 7
    """The time after the last step."""
    DONE = 8
    """The training function has returned, but other ranks are not done."""
    AWAY = 9
    """The time between two generations."""

    @property
    def word(self) -> str:
        return self.name.lower()


IN_STEP = frozenset({Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.REST, Phase.CHECKPOINT})
"""Phases inside a step, in which progress is expected."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The contents of a heartbeat page."""

    marks: int
    """Number of changes of phase so far; 0 before the first."""
    generation: int
    step: int
    """The present step."""
    phase: Phase
    marked_at: float
    """Time of the last change of phase, on the machine's monotonic clock."""
    collectives: int
    """Number of collective operations that this rank has begun in its generation."""
    beat_at: float
    """Time at which the process last held the GIL."""


class HeartbeatPage:
    """The shared page of one worker. One process writes to it, and its agent reads it."""

    def __init__(self, page: mmap.mmap, path: str = "") -> None:
        self._page, self.path = page, path
        self._marks = _MARK.unpack_from(page, 0)[0]
        self.generation, self.step, self.phase = 0, 0, Phase.START

    @classmethod
    def create(cls, path: Path) -> HeartbeatPage:
        """Create a page at `path`, in a folder that is private to this user. A former process keeps its own page.

        On a full or broken disk the page is anonymous memory at another `path`, because accessing a file's page without
        disk space would raise SIGBUS.
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
        """Open the page that an agent made for this process. Without a path, make a private page."""
        if path is None:
            return cls(mmap.mmap(-1, _BYTES))
        descriptor = os.open(path, os.O_RDWR)
        try:
            return cls(mmap.mmap(descriptor, _BYTES))
        finally:
            os.close(descriptor)

    def mark(self, phase: Phase) -> None:
        """Record that the worker has reached `phase`. Takes less than a microsecond."""
        self.phase = phase
        self._marks += 1
        _MARK.pack_into(self._page, 0, self._marks, self.generation, self.step, phase, time.monotonic())

    def beat(self, collectives: int) -> None:
        """Record that the process runs Python code."""
        _BEAT.pack_into(self._page, _BEAT_AT, collectives, time.monotonic())

    def read(self) -> Reading:
        """Return the page's contents."""
        marks, generation, step, phase, marked_at = _MARK.unpack_from(self._page, 0)
        collectives, beat_at = _BEAT.unpack_from(self._page, _BEAT_AT)
        known = Phase(phase) if phase in Phase._value2member_map_ else Phase.START
        return Reading(marks, generation, step, known, marked_at, collectives, beat_at)

    def report_unprotected(self, rank: int) -> None:
        """Record that `rank` makes an optimizer step that no checkpoint covers."""
        _UNPROTECTED.pack_into(self._page, _UNPROTECTED_AT, rank + 1, time.monotonic())

    @property
    def unprotected(self) -> tuple[int, float] | None:
        """Rank and time of an optimizer step that no checkpoint covers; None if there was none."""
        number, when = _UNPROTECTED.unpack_from(self._page, _UNPROTECTED_AT)
        return (number - 1, when) if number else None

    def order(self) -> None:
        """Announce orders to the worker, which reads them at its next change of phase."""
        self._page[_ORDERS_AT] = (self._page[_ORDERS_AT] + 1) % 256

    @property
    def orders(self) -> int:
        """A number that changes whenever there are new orders."""
        return self._page[_ORDERS_AT]
