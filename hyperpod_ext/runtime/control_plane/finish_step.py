"""Whether a rank may commit the step it was in when its generation was aborted: only if every collective of that step
had finished."""

from __future__ import annotations

import re
import sys
import threading

from hyperpod_ext.runtime.process_group.torch_private import collectives_begun

_COMPUTES = r"device_mesh\.py|_mesh_layout\.py|tensor/(?!_redistribute|_collective)"
"""What of torch.distributed an optimizer's step on DTensors goes through: it waits for nobody. Making a mesh waits in
`distributed_c10d.py`."""
_MAY_WAIT = re.compile(rf"/torch/(autograd/|nn/parallel/|distributed/(?!{_COMPUTES}))")
"""Files whose functions wait for other ranks."""


class SafeToCommit:
    """What a rank was at when the end of its generation was heard of."""

    def __init__(self) -> None:
        self._begun: int | None = None

    def look(self) -> None:
        """The end has been heard of; nobody knows yet, and nothing is cut. From the thread that listens."""
        self._begun = None if _main_thread_may_wait() else collectives_begun()

    @property
    def is_so(self) -> bool:
        """Whether the main thread was in no collective then, nor in a forward or backward pass that has some in it, and
        has begun none since."""
        return self._begun is not None and self._begun == collectives_begun()


def _main_thread_may_wait() -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if _MAY_WAIT.search(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False
