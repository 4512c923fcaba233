"""The interface of a process group backend, gloo or NCCL, for recovery.

`groups.py` opens and closes the groups, and calls each backend at the start and end of a generation. The device, not
the backend, determines which step counts after a fault: see `state/device_steps.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class Backend(Protocol):
    """One backend's part of all open groups. `abort` may be called from any thread."""

    def enter(self, world_size: int, *, lasting: bool) -> None:
        """Begin a generation, before its groups are opened. All `world_size` ranks have left the former one.

        Args:
            lasting: whether the groups keep their objects from the former generation.
        """

    def adding_group(self) -> None:
        """Prepare for one more group besides the default one."""

    def opened(self) -> None:
        """Abort the newly open default group if `abort` was called during the opening."""

    def abort(self) -> None:
        """Make all waiting calls in the groups raise, now."""

    def ending(self) -> AbstractContextManager[None]:
        """Return a context in which the groups are destroyed, or reduced to this rank.

        Raises:
            AbortStuckError: this process cannot leave the generation.
        """

    def close(self) -> None:
        """Release everything: no group will be opened again."""

    def is_broken(self, error: BaseException) -> bool:
        """Return whether the error means that the group has lost a rank."""


class AbortStuckError(RuntimeError):
    """Groups could not be aborted in time: only the end of the process ends their threads and kernels."""
