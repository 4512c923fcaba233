"""The interface that a process group backend (gloo or NCCL) implements so that a job can recover from a fault.

`groups.py` opens and closes the groups, and calls each backend at the start and end of a generation. Which step is
committed after a fault depends on the device's state (`state/device_steps.py`), and not on the backend.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class Backend(Protocol):
    """The interface of one backend, which serves all open groups. Any thread may call `abort`."""

    def enter(self, world_size: int, *, lasting: bool) -> None:
        """Begin a generation, before its groups are opened. All ranks must have left the previous generation.

        Args:
            lasting: whether the group objects of the previous generation are kept and reconfigured.
        """

    def adding_group(self) -> None:
        """Hook that is called before any group except the default group is opened."""

    def opened(self) -> None:
        """Hook that is called when the default group is open. Aborts the group if `abort` was called while it was being
        opened."""

    def abort(self) -> None:
        """Make all calls that wait in the groups raise at once."""

    def ending(self) -> AbstractContextManager[None]:
        """Return a context manager, inside which the groups are destroyed or reduced to this rank only.

        Raises:
            AbortStuckError: this process cannot leave the generation, so the process must end.
        """

    def close(self) -> None:
        """Release all resources of the backend, because no group will be opened again."""

    def is_broken(self, error: BaseException) -> bool:
        """Return whether the error means that a group has lost a rank or its connections."""


class AbortStuckError(RuntimeError):
    """Groups could not be aborted in time. Only the end of the process can end the groups' threads and GPU kernels."""
