"""Replacement for AWS's `HPWrapper`, which makes a function of the script run again after a fault.

In mode `ours`, the wrapped function is a `@resilient` function: healthy processes stay and call it again. In mode
`run`, the agent starts all processes again, and the restarted script calls the function.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
from collections.abc import Callable
from typing import Any

from hyperpod_ext.compat.checkpointless.handlers import HPState
from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.scripts.script import own_groups
from hyperpod_ext.runtime.training.loop import resilient
from hyperpod_ext.runtime.training.run import Run

__all__ = [
    "CheckpointManager",
    "HPAgentK8sAPIFactory",
    "HPCallWrapper",
    "HPWrapper",
    "PEFTCheckpointManager",
    "patch_megatron_optimizer",
    "wait_rank",
]

_runs: list[Run] = []
"""The `Run` of the wrapped function that is being called; empty if no wrapped function is being called."""


class HPWrapper:
    """Decorator that makes a function run again after a fault. All arguments are optional.

    Arguments of AWS's class that are not listed here have no effect, because the runtime does not need them.

    Args:
        abort: handler with the script's own `Abort` objects, which is called after a fault, before the function is
            called again in the same process.
        finalize: handler that is called after `abort`.
        health_check: handler that is called after `finalize`.
        enabled: whether to wrap the function; if False, the function is returned unchanged.
        checkpoint_manager: only for mode `ours`, in which state is restored from the memory of healthy ranks.
    """

    def __init__(
        self,
        *,
        abort: Callable[..., Any] | None = None,
        finalize: Callable[..., Any] | None = None,
        health_check: Callable[..., Any] | None = None,
        hp_api_factory: Callable[..., Any] | None = None,
        abort_timeout: float | None = None,
        enabled: bool = True,
        trace_file_path: str | None = None,
        async_raise_before_abort: bool = True,
        early_abort_communicator: bool = False,
        checkpoint_manager: CheckpointManager | None = None,
        check_memory_status: bool = True,
    ) -> None:
        self.enabled, self.checkpoint_manager = enabled, checkpoint_manager
        self.abort, self.finalize, self.health_check = abort, finalize, health_check

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not self.enabled:
            return function

        @functools.wraps(function)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            config = os.environ.get(ENV_RUNTIME)
            if config is not None and RuntimeConfig.from_json(config).restarts_script:
                return self._call_in_script(function, *arguments, **named)
            return self._call_resilient(function, *arguments, **named)

        return wrapped

    def _call_in_script(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call the function once. After a fault, the restarted script calls the function in a new process.

        Raises:
            JobFailedError: the wrapper has a checkpoint manager.
        """
        if self.checkpoint_manager is not None:
            raise JobFailedError(
                f"HPWrapper(checkpoint_manager={type(self.checkpoint_manager).__name__}()) keeps state in memory, but "
                "in mode `run` the script saves its state itself",
                hint="Write `mode: ours`, or leave checkpoint_manager out.",
            )
        return function(*arguments, **_with_caller(function, arguments, named, HPCallWrapper(self, None)))

    def _call_resilient(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call the function now, and in this process after each fault that leaves the process healthy."""
        called = False

        def train(run: Run) -> Any:
            nonlocal called
            caller, called, again = HPCallWrapper(self, run), True, called
            _runs[:] = [run]
            try:
                if again:
                    self._prepare_again(caller.state)
                with own_groups():
                    return function(*arguments, **_with_caller(function, arguments, named, caller))
            finally:
                _runs.clear()

        train.__name__ = function.__name__
        return resilient(train)()

    def _prepare_again(self, state: HPState) -> None:
        """Call the script's handlers after a fault, in AWS's order. The runtime aborts collectives before this call."""
        if self.abort is not None:
            self.abort(state)
        if self.finalize is not None:
            self.finalize(state, None)
        gc.collect()
        if self.health_check is not None:
            self.health_check(state, None)


class HPCallWrapper:
    """One call of a wrapped function, passed to the function's parameter with the annotation `HPCallWrapper`."""

    def __init__(self, wrapper: HPWrapper, run: Run | None) -> None:
        self._run, self.checkpoint_manager = run, wrapper.checkpoint_manager
        self.state = HPState()
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if run is None else run.generation - 1
        self.seq = self.state.iteration = int(restarts)
        """Number of faults before this call."""

    @property
    def run(self) -> Run:
        """The `Run` of this call, for a loop `for step in caller.run.steps(total, **locals())`.

        Raises:
            JobFailedError: the job has mode `run`, in which the script saves its state itself.
        """
        if self._run is None:
            raise JobFailedError(
                "HPCallWrapper.run was used in mode `run`, in which the script saves its state itself",
                hint="Write `mode: ours`, and HPWrapper(checkpoint_manager=CheckpointManager()).",
            )
        return self._run


def _with_caller(
    function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any], caller: HPCallWrapper
) -> dict[str, Any]:
    """Return the named arguments, with `caller` as the argument for each parameter annotated as `HPCallWrapper`."""
    signature = inspect.signature(function)
    bound = signature.bind_partial(*arguments, **named).arguments
    wanted = [
        name
        for name, parameter in signature.parameters.items()
        if "HPCallWrapper" in str(parameter.annotation) and name not in bound
    ]
    return named | dict.fromkeys(wanted, caller)


def current_run(name: str) -> Run:
    """Return the `Run` of the wrapped function that is being called.

    Args:
        name: name of the class that needs the run, for the error.

    Raises:
        JobFailedError: no wrapped function is being called, or the job has mode `run`.
    """
    if not _runs:
        raise JobFailedError(
            f"{name} was created outside of a function with the decorator HPWrapper, or in mode `run`",
            hint=f"Create {name} in a function with the decorator HPWrapper, and write `mode: ours`.",
        )
    return _runs[0]


class CheckpointManager:
    """Argument of HPWrapper that keeps the state in the memory of ranks and nodes, always with checksums.

    The job's `checkpoint` policy sets the tiers.
    """

    def __init__(self, enable_checksum: bool = False, enable_offload: bool = False) -> None:
        self.enable_checksum, self.enable_offload = enable_checksum, enable_offload


class PEFTCheckpointManager(CheckpointManager):
    """A CheckpointManager for training adapters such as LoRA. Frozen weights are copied only once."""


class HPAgentK8sAPIFactory:
    """Argument of HPWrapper without an effect, because the runtime finds its launcher itself."""

    def __call__(self) -> HPAgentK8sAPIFactory:
        return self


def wait_rank() -> None:
    """Do nothing, because our agent starts a process only when its rank is known."""


def patch_megatron_optimizer() -> None:
    """Do nothing, because the runtime either commits a step as a whole or repeats it."""
