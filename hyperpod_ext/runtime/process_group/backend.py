"""The interface that a process group backend (gloo or NCCL) implements for recovery.

`groups.py` opens and closes the groups, and calls each backend at the start and end of a generation. The backend does
not determine which step counts after a fault; the device does (`state/device_steps.py`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class Backend(Protocol):
    """The part of all open groups that one backend has. Any thread may call `abort`."""

    def enter(self, world_size: int, *, lasting: bool) -> None:
        """Begin a generation, before its groups are opened. All `world_size` ranks have left the former generation.

        Args:
            lasting: whether group objects are kept from the former generation.
        """

    def adding_group(self) -> None:
        """Prepare for one more group in addition to the default group."""

    def opened(self) -> None:
        """Called once the default group is open. Aborts it if `abort` was called while it was being opened."""

    def abort(self) -> None:
        """Make all waiting calls in the groups raise at once."""

    def ending(self) -> AbstractContextManager[None]:
        """Return a context in which the groups are destroyed or reduced to this rank.

        Raises:
            AbortStuckError: this process cannot leave the generation.
        """

    def close(self) -> None:
        """Release all resources, because no group will be opened again."""

    def is_broken(self, error: BaseException) -> bool:
        """Return whether the error means that a group has lost a rank."""


class AbortStuckError(RuntimeError):
    """Groups could not be aborted in time, so only the end of the process ends their threads and kernels."""
