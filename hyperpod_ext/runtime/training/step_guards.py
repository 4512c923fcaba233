"""Guards of a run's steps: the heartbeat, the NaN guard, the comparison of replicas, and fault injection.

`Watchdog` combines these guards, so that `Run` calls only one object at each event of a step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.runtime.checkpoint.checkpointer import Checkpointer
from hyperpod_ext.runtime.control_plane.agent import AbortedError
from hyperpod_ext.runtime.detection.heartbeat import Phase
from hyperpod_ext.runtime.fault_injection.from_worker import Injector, armed_faults, run_dir_of
from hyperpod_ext.runtime.process_group import broken_waits
from hyperpod_ext.runtime.snapshot.sharing import Sharing
from hyperpod_ext.runtime.state.nan_guard import NanGuard
from hyperpod_ext.runtime.state.progress import Progress
from hyperpod_ext.runtime.state.replica_check import check_replicas, is_due
from hyperpod_ext.runtime.state.training_state import CapturedState


class GuardReports(Protocol):
    """Interface with which guards send events and read whether the generation has ended."""

    @property
    def over(self) -> bool:
        """Whether the generation has ended."""

    @property
    def safe_to_commit(self) -> bool:
        """Whether the generation has ended, but the current step can still be committed."""

    def event(self, event: str, **fields: Any) -> None: ...


@functools.cache
def progress_of_this_process() -> Progress:
    """Return this process's only `Progress`, which owns its heartbeat page and its thread."""
    return Progress()


class Watchdog:
    """Calls the guards at each event of one rank's run."""

    def __init__(
        self, config: RuntimeConfig, rank: int, reports: GuardReports, checkpointer: Checkpointer | None
    ) -> None:
        self._config, self._rank, self._reports, self._checkpointer = config, rank, reports, checkpointer
        self._progress = progress_of_this_process()
        self._nan = NanGuard(config.restart.nan, rank, reports.event)
        self._objects: Mapping[str, object] = {}
        self._generation = 0
        self._reported_in = 0
        self.runs_ahead = False
        """Whether the loop runs ahead of an asynchronous device, so that collectives may be running at any time."""
        self._injector: Injector | None = None
        if checkpointer is not None:  # inject faults only in a job: other processes cannot recover
            self._injector = Injector(armed_faults(config), rank, run_dir_of(), self)

    @property
    def data_s(self) -> float:
        """Seconds from the start of the current step to its first forward pass; 0 if unknown."""
        return self._progress.data_s

    def close(self) -> None:
        """Release the hooks and the listener, before another Watchdog replaces this one."""
        self._nan.close()
        self._progress.listener = None

    def enter(self, generation: int) -> None:
        """Begin a generation."""
        self._generation = generation
        broken_waits.forget()
        self._progress.enter(generation)

    def attach(self, objects: Mapping[str, object]) -> None:
        """Set the objects that make up the state, by name."""
        self._objects = objects
        self._progress.follow(objects.values())
        self._nan.attach(objects)

    def see(self, loss: torch.Tensor) -> None:
        """Check a loss for NaN before its backward pass."""
        self._nan.see(loss)

    def begin_steps(self) -> None:
        """Begin the loop over steps.

        Raises the same errors as `end_step`: if the script has swallowed an error in an unfinished step of an earlier
        loop, the state of that step must not be committed.
        """
        self._check_over()
        self._check_swallowed()

    def begin_step(self, step: int) -> None:
        """Begin a step.

        Raises:
            AbortedError: the generation is over, and the training function has not noticed.
            SystemExit: the training function has ignored an AbortedError of this generation.
        """
        self._check_over(between_steps=True)
        self._arm()
        self._progress.begin_step(step)
        self._nan.begin_step(step)

    def end_step(self) -> None:
        """End a step, before its commit.

        Raises the same errors as `begin_step`, and ConnectionError if the script has swallowed the error of a
        collective.
        """
        # let a step end that is still safe to commit, because other ranks may need this rank's state of the step
        if self.runs_ahead or not self._reports.safe_to_commit:
            self._check_over()
        self._check_swallowed()
        self._nan.end_step()
        self._progress.mark(Phase.CHECKPOINT)

    def compares(self, step: int) -> bool:
        """Return whether the ranks compare their states after `step`."""
        return is_due(step, self._config.restart.compare_replicas_every)

    def compare(self, step: int, captured: CapturedState) -> None:
        """Compare the states of the ranks, if a comparison is due after `step`. Collective.

        Raises:
            ReplicasDifferError: the ranks' states differ.
        """
        if not self.compares(step):
            return
        sharing = Sharing.of(captured.sharing())
        if sharing.kind != "shard":
            check_replicas(step, captured, sharing.ranks)

    def end_steps(self) -> None:
        """Set the heartbeat's phase to AFTER, once the last step has ended."""
        self._progress.mark(Phase.AFTER)

    def done(self) -> None:
        """Set the heartbeat's phase to DONE, once the training function has ended."""
        self._progress.mark(Phase.DONE)

    def leave(self) -> None:
        """Set the heartbeat's phase to AWAY, when this rank leaves a generation."""
        self._progress.mark(Phase.AWAY)

    def _arm(self) -> None:
        """Start the fault injector once the job's spec or an order contains a fault.

        Without faults, the injector is not started, so that it costs no time in steps.
        """
        if self._injector is None or self._progress.listener is not None:
            return
        if self._injector or self._progress.has_orders:
            self._injector.obey(lambda: self._progress.has_orders)
            self._progress.listener = self._injector

    def _check_swallowed(self) -> None:
        """Refuse to commit a step in which the training function has swallowed the error of a collective.

        Raises:
            AbortedError: the fault behind the error has already ended the generation.
            ConnectionError: the generation has not ended yet; the `@resilient` loop waits for its end.
        """
        if why := broken_waits.first():
            self._check_over()
            raise ConnectionError(f"{why} (raised within step {self._progress.step}, and swallowed there)")

    def _check_over(self, *, between_steps: bool = False) -> None:
        """Stop a training function that has not noticed the end of its generation, because its work would be discarded.

        The training function may not have called a collective since the end of the generation, or may have caught our
        exception.

        Args:
            between_steps: whether no step is running, so that no event is logged.
        """
        if not self._reports.over:
            return
        self._progress.listener = None
        why = f"generation {self._generation} is over"
        if self._reported_in == self._generation:
            raise SystemExit(why)  # SystemExit passes `except Exception`; `@resilient` treats it as an abort
        self._reported_in = self._generation
        if not between_steps:
            self._reports.event("given_up", rank=self._rank, step=self._progress.step)
            sys.stderr.write(
                f"hyperpod_ext: step {self._progress.step} of rank {self._rank} is given up, for a fault of another "
                "rank. If the training function catches exceptions, let AbortedError and errors of collectives pass.\n"
            )
        raise AbortedError(why)

    # --- what injected faults need ----------------------------------------------------------------

    def event(self, event: str, **fields: Any) -> None:
        self._reports.event(event, **fields)

    def snapshots(self) -> tuple[memoryview, int, int] | None:
        if self._checkpointer is None:
            return None
        self._checkpointer.flush()
        return self._checkpointer.own_slots()

    def first_parameter(self) -> torch.Tensor | None:
        modules = [value for value in self._objects.values() if isinstance(value, torch.nn.Module)]
        return next((parameter for module in modules for parameter in module.parameters()), None)
