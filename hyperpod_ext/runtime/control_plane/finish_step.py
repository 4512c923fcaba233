"""Decides whether a rank may commit the step that it was making when its generation was aborted.

A rank may commit an aborted step if none of the step's collectives was unfinished.
"""

from __future__ import annotations

import re
import sys
import threading

from hyperpod_ext.runtime.process_group.torch_private import collectives_begun

_COMPUTES = r"device_mesh\.py|_mesh_layout\.py|tensor/(?!_redistribute|_collective)"
"""Files of torch.distributed whose code never waits for other ranks in an optimizer step on DTensors. Making a device
mesh does wait, but its waiting code is in `distributed_c10d.py`."""
_MAY_WAIT = re.compile(rf"/torch/(autograd/|nn/parallel/|distributed/(?!{_COMPUTES}))")
"""Files of torch whose functions may wait for other ranks."""


class SafeToCommit:
    """State of a rank's collectives at the moment when the rank received the abort of its generation."""

    def __init__(self) -> None:
        self._begun: int | None = None

    def look(self) -> None:
        """Record the state of the main thread. The receiving thread calls this before it aborts any process group."""
        self._begun = None if _main_thread_may_wait() else collectives_begun()

    @property
    def is_so(self) -> bool:
        """Whether the step may be committed.

        The step may be committed if the main thread was outside of collectives and outside of forward and backward
        passes, which may contain collectives, and if it has begun no collective since."""
        return self._begun is not None and self._begun == collectives_begun()


def _main_thread_may_wait() -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if _MAY_WAIT.search(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False
