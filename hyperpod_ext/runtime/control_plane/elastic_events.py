"""Stop all ranks after the same step when the operator will restart the job with a different number of nodes.

Under `hyperpodrun`, the operator's agents send SIGUSR1 to their workers, at different times. Some time later they kill
processes that still run. At the end of each step, ranks start an all-reduce of a flag, which is set if the signal has
arrived, and read its result at the end of the next step. So all ranks read the same result at the same step, and no
rank waits for it. An error of the all-reduce is a fault like that of any other collective, and never counts as "no
signal".
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
    """Whether this process has received the signal. A process has one such object, made in its main thread."""

    def __init__(self) -> None:
        self.received = False
        self._before = signal.signal(signal.SIGUSR1, self._receive)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.received = True
        if callable(self._before):  # AWS's elastic_event_detected() must keep working in the script
            self._before(signum, frame)


class StopAtElasticEvent(StopAtStep):
    """Stops all ranks after one step, saves, and ends the process.

    Args:
        last: called on every rank after its save. Returns when all ranks have saved and processes may end.
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
        flag = torch.tensor([int(self._event.received)], dtype=torch.int32)  # the default group uses gloo
        self._sum = flag, dist.all_reduce(flag, dist.ReduceOp.MAX, async_op=True)
        if step == self._total:  # no next step follows in which the result could be read
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
        os._exit(0)  # `_last` has returned, so no other rank needs this process
