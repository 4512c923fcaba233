"""Stops all ranks after the same step when the operator will restart the job with a different number of nodes.

Under `hyperpodrun`, the operator's agents send SIGUSR1 to their workers, each at a different time. Some time after this
signal, the agents kill the processes that are still running. At the end of each step, the ranks start an all-reduce of
a flag: whether this rank has received the signal. The ranks read the result of the all-reduce at the end of the next
step. So all ranks read the same result at the same step, and no rank has to wait for the all-reduce. An error of the
all-reduce is handled as a fault, like an error of any other collective. An error of the all-reduce never counts as "no
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
    """Records whether this process has received SIGUSR1. A process has one `ElasticEvent`, made in its main thread."""

    def __init__(self) -> None:
        self.received = False
        self._before = signal.signal(signal.SIGUSR1, self._receive)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.received = True
        if callable(self._before):  # also call the previous handler, which AWS's elastic_event_detected() needs
            self._before(signum, frame)


class StopAtElasticEvent(StopAtStep):
    """Stops all ranks after the same step, saves, and ends the process.

    Args:
        last: called on every rank after the rank's save. Processes may end when `last` has returned.
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
        # create `flag` on the CPU, because the default group uses gloo for CPU tensors
        flag = torch.tensor([int(self._event.received)], dtype=torch.int32)
        self._sum = flag, dist.all_reduce(flag, dist.ReduceOp.MAX, async_op=True)
        if step == self._total:  # read the result of the last step now, because no later step would read it
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
        os._exit(0)  # all ranks have saved (see `last`), so no other rank needs this process
