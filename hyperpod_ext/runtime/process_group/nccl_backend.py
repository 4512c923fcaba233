"""Aborts NCCL's collectives after a fault. The communicators of all groups are aborted at the same time, in threads.

All aborts are started before this process waits for the end of an abort, because kernels of different communicators can
wait for each other, and so can their aborts. An aborted communicator cannot be used again, so groups are destroyed and
made again, or reconfigured. Sources: `ProcessGroupNCCL.cpp` of torch and `ncclCommAbort` of NCCL. Results of runs on a
GPU are in docs/gpu.md.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch

from hyperpod_ext.errors import ConfigError
from hyperpod_ext.runtime.process_group import torch_private as torch_names
from hyperpod_ext.runtime.process_group.backend import AbortStuckError
from hyperpod_ext.runtime.process_group.nccl import versions
from hyperpod_ext.runtime.process_group.nccl.captured_graphs import CapturedGraphs
from hyperpod_ext.runtime.process_group.nccl.environment import engines_used, nccl_environment

_LIMIT_S = 20.0
"""Time limit of an abort in seconds. An abort ends after milliseconds, after 500 ms (the interval of NCCL's proxy), or
never."""
_SIGNS = (
    *("NCCL communicator was aborted", "ncclRemoteError", "ncclSystemError", "ncclInternalError", "NCCL timeout"),
    # NCCL's own messages (ncclGetErrorString of NCCL 2.30.7), which torch's second implementation raises
    *("remote process exited or there was a network error", "unhandled system error", "internal error - please report"),
    "NCCL operation timed out",
    # message of torch's second implementation for an aborted group
    "corrupted comm object detected",
)


class Communicators(Protocol):
    """The communicators of one group, which torch aborts together."""

    def abort(self) -> None:
        """Abort the communicators. Returns when no call waits in the communicators any more."""


class _Call:
    """A call in its own thread, so that this process can stop waiting if the call never ends."""

    def __init__(self, what: str, call: Callable[[], object]) -> None:
        self.what = what
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), name="hpx-nccl", daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # `_end_all` raises this error in the waiting thread
            self.error = error

    def ended(self, deadline: float) -> bool:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()


class Nccl:
    """The backend NCCL of the process groups, in all generations of this process.

    Args:
        communicators: function that returns the communicators of each open group, by group name.
        synchronize: function that waits until the GPU has finished all queued work.
        drop_graphs: function that drops all captured CUDA graphs that contain collectives.
    """

    def __init__(
        self,
        communicators: Callable[[], Mapping[str, Communicators]],
        synchronize: Callable[[], object],
        drop_graphs: Callable[[], object] = lambda: None,
    ) -> None:
        self._communicators, self._synchronize, self._drop_graphs = communicators, synchronize, drop_graphs
        self._aborts: dict[str, _Call] = {}
        """Aborts that were started in this generation, by group name."""
        self._aborted = False
        self._lock = threading.Lock()

    @classmethod
    def prepare(cls) -> Nccl:
        """Set NCCL's environment for recovery, check the libraries, and select this process's GPU. Must be called
        before the first group is opened.

        Raises:
            ConfigError: the environment or an installed library does not allow recovery.
        """
        os.environ.update(nccl_environment(engines_used(torch.__version__, os.environ), os.environ))
        found = versions.judge(versions.installed(os.environ, built_in=torch.cuda.nccl.version()))
        if refused := [each.problem for each in found if each.severity == "refuse"]:
            raise ConfigError(refused)
        for each in found:
            sys.stderr.write(f"{each.problem}\n")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())

        graphs = CapturedGraphs(torch_names.collectives_begun, torch.cuda.CUDAGraph)
        return cls(lambda: torch_names.backends_of("cuda"), torch.cuda.synchronize, graphs.drop)

    def enter(self, world_size: int, *, lasting: bool) -> None:
        with self._lock:
            self._aborted = False

    def adding_group(self) -> None:
        """Do nothing: after the store is cancelled, a new group gets no communicator, so it needs no abort."""

    def opened(self) -> None:
        if self._aborted:
            self.abort()

    def abort(self) -> None:
        """Start to abort all communicators. `ending` waits until the aborts have ended."""
        with self._lock:
            if not self._aborted:
                self._drop_graphs()
            self._aborted = True
            for name, communicators in self._communicators().items():
                if name not in self._aborts:
                    self._aborts[name] = _Call(f"the abort of group {name}", communicators.abort)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        deadline = time.monotonic() + _LIMIT_S
        with self._lock:
            aborts, self._aborts = list(self._aborts.values()), {}
        _end_all(aborts, deadline)
        if aborts:  # queued kernels run after the abort, on invalid data that nothing uses
            _end_all([_Call("the work queued on the GPU", self._synchronize)], deadline)
        del aborts  # keep no reference to a thread or group
        yield

    def close(self) -> None:
        pass

    def is_broken(self, error: BaseException) -> bool:
        return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def _end_all(calls: list[_Call], deadline: float) -> None:
    """Wait until all calls have ended.

    Raises:
        AbortStuckError: a call has not ended by the deadline, or has raised an error.
    """
    late = [call.what for call in calls if not call.ended(deadline)]
    if late:
        raise AbortStuckError(f"{', '.join(late)}: not done after {_LIMIT_S:g} s")
    for call in calls:
        if call.error is not None:
            raise AbortStuckError(f"{call.what} failed: {call.error}") from call.error
