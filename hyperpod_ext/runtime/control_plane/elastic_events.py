"""The operator's elastic policy under `hyperpodrun`: it is about to start the job with another number of nodes.

Its agents tell their workers by SIGUSR1, each when it comes to it, and end those that live on after a while. Ranks
agree on the step after which they stop: at the end of each step they begin to sum who has been told, and read the sum
at the end of the next. So all read the same at the same step, and nobody waits for it. A failure of that sum is a fault
like that of any other collective; it is never taken for "nobody was told".
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from hyperpod_ext.runtime.control_plane.stop_at_step import StopAtStep


class ElasticEvent:
    """Whether the agent has told this process. One a process; made in the main thread."""

    def __init__(self) -> None:
        self.received = False
        self._before = signal.signal(signal.SIGUSR1, self._hear)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        self.received = True
        if callable(self._before):  # a script that asks AWS's elastic_event_detected() goes on hearing it
            self._before(signum, frame)


class StopAtElasticEvent(StopAtStep):
    """Stops all ranks after one step, saves, and ends the process.

    Args:
        last: called on every rank when its state is saved; returns when all ranks' is, and processes may end.
    """

    ends = True

    def __init__(self, event: ElasticEvent, last: Callable[[int], None]) -> None:
        super().__init__()
        self._event, self._last = event, last
        self._sum: tuple[torch.Tensor, Any] | None = None
        self._due = False

    def begin(self, step: int, total: int) -> None:
        self._sum, self._due, self._total = None, False, total

    def stops_after(self, step: int, *, consistent: bool) -> bool:
        self._read()
        if self._due and consistent:
            return True
        flag = torch.tensor([int(self._event.received)], dtype=torch.int32)  # the default group is gloo's
        self._sum = flag, dist.all_reduce(flag, dist.ReduceOp.MAX, async_op=True)
        if step == self._total:  # there is no next step at whose end it could be read
            self._read()
        return self._due and consistent

    def _read(self) -> None:
        if self._sum is not None:
            flag, work = self._sum
            work.wait()
            self._due |= bool(flag.item())
            self._sum = None

    def stop(self, step: int, **fields: Any) -> None:
        self._last(step)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # what others still have to read of this process, they have
