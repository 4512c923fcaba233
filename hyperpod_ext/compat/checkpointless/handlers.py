"""Handlers that HPWrapper calls after a fault, before it calls the script's function again in the same process."""

from __future__ import annotations

import abc
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.process_group.backend import AbortStuckError

__all__ = [
    "Abort",
    "AbortTransformerEngine",
    "CheckpointlessAbortManager",
    "CheckpointlessFinalizeCleanup",
    "Compose",
    "CudaHealthCheck",
    "Finalize",
    "HPAbortTorchDistributed",
    "HPCheckpointingAbort",
    "HPDataLoaderAbort",
    "HealthCheck",
    "ThreadedFinalize",
]


class HPState:
    """State that handlers receive: rank, world size and number of restarts."""

    def __init__(self) -> None:
        self.rank, self.world_size = (int(os.environ.get(name, "-1")) for name in ("RANK", "WORLD_SIZE"))
        self.iteration = 0


class Abort(abc.ABC):
    """Base class for the script's own abort handlers. The runtime aborts all collectives before it calls a handler."""

    @abc.abstractmethod
    def __call__(self, state: Any = None, *_: Any, **__: Any) -> Any: ...


class _Unneeded(Abort):
    """An abort handler that does nothing, for scripts that use AWS's names.

    The runtime itself aborts collectives, and the memory server, which is another process, stores snapshots.
    """

    def __call__(self, state: Any = None, *_: Any, **__: Any) -> Any:
        return state


class AbortTransformerEngine(_Unneeded): ...


class HPAbortTorchDistributed(_Unneeded): ...


class HPCheckpointingAbort(_Unneeded): ...


class HPDataLoaderAbort(_Unneeded): ...


class Finalize(abc.ABC):
    """Base class for handlers that clean up after the abort."""

    @abc.abstractmethod
    def __call__(self, state: Any = None, train_ex: Exception | None = None) -> Any: ...


class CheckpointlessFinalizeCleanup(Finalize):
    """Does nothing: the runtime clears the local variables of the failed call, and keeps the objects of `run.keep`."""

    def __call__(self, state: Any = None, train_ex: Exception | None = None) -> Any:
        return state, train_ex

    def register_attributes(self, trainer: Any) -> None:
        """Do nothing, because this handler cleans up no trainer."""


class ThreadedFinalize(Finalize):
    """Calls `fn` in a thread, and waits at most `timeout` for the end of the call."""

    def __init__(
        self,
        timeout: timedelta,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.timeout, self.fn, self.args, self.kwargs = timeout, fn, args, kwargs or {}

    def __call__(self, state: Any = None, train_ex: Exception | None = None) -> None:
        """Call `fn`. Raises JobFailedError if `fn` takes longer than `timeout`, and the error that `fn` raises."""
        if not _ends_within(self.timeout, lambda: self.fn(*self.args, **self.kwargs)):
            raise JobFailedError(
                f"finalize: {getattr(self.fn, '__name__', self.fn)} took longer than {self.timeout}",
                hint="Increase the timeout of ThreadedFinalize.",
            )


class HealthCheck(abc.ABC):
    """Base class for health checks of this process. A failed check raises an exception."""

    @abc.abstractmethod
    def __call__(self, state: Any = None, train_ex: Exception | None = None) -> Any: ...


class CudaHealthCheck(HealthCheck):
    """Waits until this rank's GPU has finished its work. A process whose GPU does not answer is replaced."""

    def __init__(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        self.timeout = timeout

    def __call__(self, state: Any = None, train_ex: Exception | None = None) -> Any:
        """Wait for the GPU.

        Raises:
            AbortStuckError: the GPU has not finished its work within the timeout.
            RuntimeError: the CUDA context is unusable; torch raises this error.
        """
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            local_rank = os.getenv("LOCAL_RANK")
            index = torch.cuda.current_device() if local_rank is None else int(local_rank)
            device = torch.device("cuda", index)
            if not _ends_within(self.timeout, lambda: torch.cuda.synchronize(device)):
                raise AbortStuckError(f"{device} has not finished its work within {self.timeout}")
            torch.cuda.synchronize(device)
        return state, train_ex


class Compose:
    """A handler that calls several handlers, in reverse order."""

    def __init__(self, *instances: Callable[..., Any]) -> None:
        self.instances = instances

    def __call__(self, *arguments: Any, **named: Any) -> list[Any]:
        """Call all handlers, even if one of them fails, and return their results.

        Raises:
            ExceptionGroup: at least one handler has failed.
        """
        results, failures = [], []
        for each in reversed(self.instances):
            try:
                results.append(each(*arguments, **named))
            except Exception as error:
                failures.append(error)
        if failures:
            raise ExceptionGroup("handlers of HPWrapper have failed", failures)
        return results


class CheckpointlessAbortManager:
    """Factory for the `abort` argument of HPWrapper."""

    @staticmethod
    def get_default_checkpointless_abort() -> Compose:
        """Return a `Compose` of AWS's four abort handlers."""
        return Compose(AbortTransformerEngine(), HPCheckpointingAbort(), HPAbortTorchDistributed(), HPDataLoaderAbort())

    @staticmethod
    def create_custom_abort(*abort_instances: Abort) -> Compose:
        """Return a `Compose` of the given handlers. Raises ValueError if no handler is given."""
        if not abort_instances:
            raise ValueError("At least one abort instance must be provided")
        return Compose(*abort_instances)

    @staticmethod
    def override_abort(abort_compose: Compose, abort_type: type, new_abort: Abort) -> Compose:
        """Return the handlers of `abort_compose`, with each handler of class `abort_type` replaced by `new_abort`.

        Raises:
            ValueError: `abort_compose` is no Compose.
        """
        if not isinstance(abort_compose, Compose):
            raise ValueError("abort_compose must have 'instances' attribute")
        return Compose(*(new_abort if isinstance(each, abort_type) else each for each in abort_compose.instances))


def _ends_within(timeout: timedelta, call: Callable[[], object]) -> bool:
    """Run `call` in a thread, and return whether the call has ended within `timeout`. Raises any error of the call."""
    errors = []

    def catching() -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=catching, daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    for error in errors:
        raise error
    return not thread.is_alive()
