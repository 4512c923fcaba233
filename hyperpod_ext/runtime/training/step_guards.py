"""What goes along with a run's steps: its heartbeat, the NaN guard, the comparison of replicas, rehearsed faults.

All of it in one place, so that `Run` has one thing to tell of each moment.
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
    """Where reports go."""

    @property
    def over(self) -> bool:
        """Whether the generation has ended."""

    @property
    def safe_to_commit(self) -> bool:
        """Whether it has, and the step that is being made can still end as any other."""

    def event(self, event: str, **fields: Any) -> None: ...


@functools.cache
def progress_of_this_process() -> Progress:
    """One a process: its page, its thread."""
    return Progress()


class Watchdog:
    """Told of each moment of one rank's run."""

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
        """Whether a device works behind the loop: that no collective is being called does not mean that none is under
        way."""
        self._injector: Injector | None = None
        if checkpointer is not None:  # a job: alone, there is nobody to recover
            self._injector = Injector(armed_faults(config), rank, run_dir_of(), self)

    @property
    def data_s(self) -> float:
        """Seconds from the beginning of this step to its first forward pass; 0 where that is not seen."""
        return self._progress.data_s

    def close(self) -> None:
        """Let go of the objects; another one takes this one's place."""
        self._nan.close()
        self._progress.listener = None

    def enter(self, generation: int) -> None:
        """A generation begins."""
        self._generation = generation
        broken_waits.forget()
        self._progress.enter(generation)

    def attach(self, objects: Mapping[str, object]) -> None:
        """These make up the state."""
        self._objects = objects
        self._progress.follow(objects.values())
        self._nan.attach(objects)

    def see(self, loss: torch.Tensor) -> None:
        """A loss, before its backward pass."""
        self._nan.see(loss)

    def begin_steps(self) -> None:
        """The loop begins. Raises like `begin_step`."""
        self._check_over()

    def begin_step(self, step: int) -> None:
        """A step begins.

        Raises:
            AbortedError: the generation is over, and the training function has not noticed.
            SystemExit: it has been told so before, and went on.
        """
        self._check_over(between_steps=True)
        self._arm()
        self._progress.begin_step(step)
        self._nan.begin_step(step)

    def end_step(self) -> None:
        """The loop body of a step has ended; it is about to be committed. Raises like `begin_step`, and ConnectionError
        where the error of a collective was swallowed."""
        if (
            self.runs_ahead or not self._reports.safe_to_commit
        ):  # else others may have no other copy of what this rank has made
            self._check_over()
        self._check_swallowed()
        self._nan.end_step()
        self._progress.mark(Phase.CHECKPOINT)

    def compares(self, step: int) -> bool:
        """Whether ranks compare what they hold after this step."""
        return is_due(step, self._config.restart.compare_replicas_every)

    def compare(self, step: int, captured: CapturedState) -> None:
        """See whether ranks agree on what they hold, when that is due. Collective.

        Raises:
            ReplicasDifferError: they do not.
        """
        if not self.compares(step):
            return
        sharing = Sharing.of(captured.sharing())
        if sharing.kind != "shard":
            check_replicas(step, captured, sharing.ranks)

    def end_steps(self) -> None:
        """The last step is made."""
        self._progress.mark(Phase.AFTER)

    def done(self) -> None:
        """The training function has returned."""
        self._progress.mark(Phase.DONE)

    def leave(self) -> None:
        """A generation is over, and let go of."""
        self._progress.mark(Phase.AWAY)

    def _arm(self) -> None:
        """Faults that can be ordered while the job runs need someone to look; where none can, nobody is asked."""
        if self._injector is None or self._progress.listener is not None:
            return
        if self._injector or self._progress.has_orders:
            self._injector.obey(lambda: self._progress.has_orders)
            self._progress.listener = self._injector

    def _check_swallowed(self) -> None:
        """Refuse to commit what a collective has not finished: its error was raised, and the training function went on.

        Raises:
            AbortedError: it was for a fault that is known.
            ConnectionError: it is not known yet, and the loop asks for it.
        """
        if why := broken_waits.first():
            self._check_over()
            raise ConnectionError(f"{why} (raised within step {self._progress.step}, and swallowed there)")

    def _check_over(self, *, between_steps: bool = False) -> None:
        """Stop a training function that has not noticed the end of its generation: what it does now goes nowhere.

        It may have made no collective since, or have caught our exception: nobody can tell here. Between two steps
        there is nothing to be said of it.
        """
        if not self._reports.over:
            return
        self._progress.listener = None
        why = f"generation {self._generation} is over"
        if self._reported_in == self._generation:
            raise SystemExit(why)  # passes through `except Exception`, and the loop takes it for what it is
        self._reported_in = self._generation
        if not between_steps:
            self._reports.event("given_up", rank=self._rank, step=self._progress.step)
            sys.stderr.write(
                f"hyperpod_ext: step {self._progress.step} of rank {self._rank} is given up, for a fault elsewhere. "
                "If the training function catches exceptions, let AbortedError and errors of collectives pass.\n"
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
