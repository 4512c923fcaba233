"""`HPWrapper`: a function of the script that runs again after a fault.

In mode `ours` it is a `@resilient` function: healthy processes stay, and call it again. In mode `run` the agent starts
all processes again, and the script calls it from there.
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
"""The run of the function that is being called; empty: none."""


class HPWrapper:
    """Decorator of a function that runs again after a fault. Needs no argument.

    Args:
        abort: the script's own `Abort` objects, called before the function is called again in the same process.
        finalize: called after them.
        health_check: called last.
        enabled: False leaves the function as it is.
        checkpoint_manager: mode `ours` only: the state comes from the memory of healthy ranks.
        unused: all other arguments of AWS's class, which the runtime does not need.
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
        """Call the function once. After a fault, a new process calls it.

        Raises:
            JobFailedError: the wrapper has a checkpoint manager.
        """
        if self.checkpoint_manager is not None:
            raise JobFailedError(
                f"HPWrapper(checkpoint_manager={type(self.checkpoint_manager).__name__}()) keeps state in memory; in "
                "mode `run` the script saves its state itself",
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
            if again:
                self._prepare_again(caller.state)
            with own_groups():
                return function(*arguments, **_with_caller(function, arguments, named, caller))

        train.__name__ = function.__name__
        return resilient(train)()

    def _prepare_again(self, state: HPState) -> None:
        """Call the script's own handlers, in AWS's order. The runtime has aborted the collectives before."""
        if self.abort is not None:
            self.abort(state)
        if self.finalize is not None:
            self.finalize(state, None)
        gc.collect()
        if self.health_check is not None:
            self.health_check(state, None)


class HPCallWrapper:
    """One call of a wrapped function: the argument that has this class as its annotation."""

    def __init__(self, wrapper: HPWrapper, run: Run | None) -> None:
        self._run, self.checkpoint_manager = run, wrapper.checkpoint_manager
        self.state = HPState()
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if run is None else run.generation - 1
        self.seq = self.state.iteration = int(restarts)
        """Number of faults before this call."""

    @property
    def run(self) -> Run:
        """The run, for `for step in caller.run.steps(total, **locals())`.

        Raises:
            JobFailedError: in mode `run`, where the script saves its state itself.
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
    """Return the named arguments, with `caller` as the parameter that has its class as annotation."""
    signature = inspect.signature(function)
    bound = signature.bind_partial(*arguments, **named).arguments
    wanted = [
        name
        for name, parameter in signature.parameters.items()
        if "HPCallWrapper" in str(parameter.annotation) and name not in bound
    ]
    return named | dict.fromkeys(wanted, caller)


def current_run(name: str) -> Run:
    """Return the run of the wrapped function that is being called.

    Raises:
        JobFailedError: `name` is used outside of such a function, or in mode `run`.
    """
    if not _runs:
        raise JobFailedError(
            f"{name} was made outside of a function of HPWrapper, or in mode `run`",
            hint="Make it in the function, and write `mode: ours`.",
        )
    return _runs[0]


class CheckpointManager:
    """State in the memory of ranks and nodes, always with checksums. The job's `checkpoint` sets the tiers."""

    def __init__(self, enable_checksum: bool = False, enable_offload: bool = False) -> None:
        self.enable_checksum, self.enable_offload = enable_checksum, enable_offload


class PEFTCheckpointManager(CheckpointManager):
    """The same, for adapters such as LoRA: weights that do not change are copied once."""


class HPAgentK8sAPIFactory:
    """Argument of HPWrapper that the runtime does not need: it finds its launcher itself."""

    def __call__(self) -> HPAgentK8sAPIFactory:
        return self


def wait_rank() -> None:
    """Do nothing: our agent starts a process when its rank is known."""


def patch_megatron_optimizer() -> None:
    """Do nothing: the runtime commits a step as one, or repeats it."""
