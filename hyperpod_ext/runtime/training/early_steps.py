"""Detect optimizer steps that no snapshot contains.

An optimizer step before the first step of `run.steps` is an error, because its trainer apparently does not use the run.
An optimizer step in a job without a `@resilient` function is the script's choice, and causes only a warning.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.control_plane.launcher import find_launcher
from hyperpod_ext.runtime.detection.heartbeat import ENV_HEARTBEAT, HeartbeatPage
from hyperpod_ext.runtime.events.of_training import UNPROTECTED


class EarlySteps:
    """A context manager that calls `see` before each optimizer step, until `end` is called, except inside `allowed`."""

    def __init__(self, see: Callable[[str], None]) -> None:
        self._call = see
        self._hook: Any = None
        self._allowed = False

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self) -> None:
        """Call `see` before each optimizer step from now on."""
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._see)

    def end(self) -> None:
        """Stop checking optimizer steps, because the run's own steps begin."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def end_after_step(self) -> None:
        """Stop checking after the current optimizer step. No hook may be removed during a step, because torch iterates
        over the hooks then."""

        def end(*_: object) -> None:
            self.end()
            self._allowed = False
            hook.remove()  # removing a hook is safe here, because torch calls this hook last

        self._allowed = True
        hook = register_optimizer_step_post_hook(end)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Allow optimizer steps inside the context: building or restoring an object may need some."""
        self._allowed, before = True, self._allowed
        try:
            yield
        finally:
            self._allowed = before

    def _see(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._allowed:
            self._call(f"{type(optimizer).__name__}.step()")


def refuse(step: str) -> None:
    """Raise an error for an optimizer step before the first step of the run.

    Raises:
        JobFailedError: always.
    """
    raise JobFailedError(
        f"{step} was called before the first step of run.steps, so snapshots would not contain this optimizer step",
        hint="Call run.restore(...), then make steps inside `for step in run.steps(...)`. A library's trainer "
        "needs an adapter: see docs/integrations.md. Optimizer steps that only build an object belong into run.keep.",
    )


def warn_of_unprotected_steps() -> None:
    """Warn before the first optimizer step of this process, if the process is a rank of a job and its `@resilient`
    function has not begun.

    The check also applies to processes that are forked from this process. `unprotected_steps.end()` ends the check.
    """
    unprotected_steps.begin()


def _warn(step: str) -> None:
    unprotected_steps.end_after_step()
    if find_launcher() is None or not _is_in_mode_ours():
        return
    rank = int(os.environ["RANK"])
    if rank == 0:
        sys.stderr.write(f"hyperpod_ext: warning: {step} is called, but {UNPROTECTED}\n")
    if path := os.environ.get(ENV_HEARTBEAT):
        _report(path, rank)


def _is_in_mode_ours() -> bool:
    """Return whether the job's config has mode `ours`, in which the script's `@resilient` function protects the steps.

    Without a config, as under torchrun, the mode is `ours`.
    """
    text = os.environ.get(ENV_RUNTIME)
    return text is None or RuntimeConfig.from_json(text).mode == "ours"


def _report(page: str, rank: int) -> None:
    """Report the unprotected optimizer step to the agent, which writes it to the event log."""
    try:
        HeartbeatPage.of(page).report_unprotected(rank)
    except OSError as error:  # a warning that cannot be sent must not stop training
        sys.stderr.write(f"hyperpod_ext: {page} cannot be written, so the log lacks this warning: {error.strerror}\n")


unprotected_steps = EarlySteps(_warn)
"""The check for optimizer steps before this process's `@resilient` function begins."""
