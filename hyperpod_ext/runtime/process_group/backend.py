"""What recovery needs of the backend of process groups; how the rest of the runtime knows gloo and NCCL.

`groups.py` opens and closes the groups, and tells each backend in them what becomes of a generation. Which step counts
after a fault is not a backend's affair, but the device's: see `state/device_steps.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class Backend(Protocol):
    """The part of every open group that one backend does. `abort` may be called from any thread."""

    def enter(self, world_size: int, *, lasting: bool) -> None:
        """A generation begins: its groups are opened next, by `world_size` ranks that have all left the former one.

        Args:
            lasting: whether the groups' objects are those of the former generation.
        """

    def adding_group(self) -> None:
        """One more group is about to be made, beside the default one."""

    def opened(self) -> None:
        """The default group is open. An abort that came meanwhile may have missed it."""

    def abort(self) -> None:
        """Make whatever waits in the groups raise, now."""

    def ending(self) -> AbstractContextManager[None]:
        """The groups are destroyed inside of it, or get this rank alone.

        Raises:
            AbortStuckError: this process cannot leave the generation.
        """

    def close(self) -> None:
        """No group is opened any more."""

    def is_broken(self, error: BaseException) -> bool:
        """Whether this is what a rank meets in a group that lost a rank."""


class AbortStuckError(RuntimeError):
    """Groups could not be aborted in time: nothing but the end of the process ends their threads and kernels."""
