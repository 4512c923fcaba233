"""The class `Run`, whose object is the argument of a training function."""

from __future__ import annotations

import inspect
import math
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch.nn.parallel import DistributedDataParallel

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.checkpoint.checkpointer import Checkpointer
from hyperpod_ext.runtime.control_plane.agent import AbortedError
from hyperpod_ext.runtime.data import world
from hyperpod_ext.runtime.memory_server.protocol.requests import WhenBusy
from hyperpod_ext.runtime.snapshot.manifest import save_id_of
from hyperpod_ext.runtime.state import gradients, meshes
from hyperpod_ext.runtime.state.built import Changes
from hyperpod_ext.runtime.state.device_steps import Device, DeviceSteps, device_of
from hyperpod_ext.runtime.state.seeding import seed_step
from hyperpod_ext.runtime.state.training_state import CapturedState, ConsistentStep, Stateful, TrainingState
from hyperpod_ext.runtime.state.unsaved.reachable import is_ours
from hyperpod_ext.runtime.state.unsaved.unsaved_state import UnsavedState
from hyperpod_ext.runtime.training.data_parallel import DataParallel
from hyperpod_ext.runtime.training.early_steps import EarlySteps, refuse
from hyperpod_ext.runtime.training.epochs import Batches, EpochData, epochs_of
from hyperpod_ext.runtime.training.registration import check_registered, stateful
from hyperpod_ext.runtime.training.restore import Link
from hyperpod_ext.runtime.training.step_guards import Watchdog

if TYPE_CHECKING:
    from hyperpod_ext.runtime.reproducible import Reproducible

Kept = TypeVar("Kept")


@dataclass
class _Kept:
    """Result of a call of `run.keep`, with the process groups that its `build` made."""

    value: Any
    made: meshes.Made
    """Process groups and device meshes made by `build`."""
    group: tuple[int, int]
    """This process's rank and world size when `value` was built or last reused."""

    @property
    def is_of_one_world(self) -> bool:
        """Whether `value` can be used only with the world size for which it was built."""
        return bool(self.made.calls or self.made.meshes) or meshes.is_sharded(self.value)


_RESERVED = {
    *("t", "type", "event", "rank", "node", "generation", "self"),
    *("step", "of", "began", "data_s", "checkpoint_s", "snapshot"),
}
"""Field names of the event log, which metrics must not use."""


class Run:
    """One rank's view of the job.

    A training function first calls `keep` to build objects that survive faults, then `restore` to load the newest step
    that every rank can restore, then `data_parallel` to wrap the model, and then iterates over `steps`. After a fault,
    the training function is called again, with the same `Run` in each process that stays in the job.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        rank: int,
        local_rank: int,
        link: Link,
        checkpointer: Checkpointer | None,
        world_size: int | None = None,
    ) -> None:
        self.config = config
        self.rank = rank
        """This process's rank. An elastic job may change `rank` and `world_size` between calls of the training
        function."""
        self.local_rank = local_rank
        self.world_size = world_size or config.world_size
        self.full_size = self.world_size
        """Number of ranks when no rank is missing. With `restart.policy: continue`, ranks may be missing."""
        self.generation = 0
        """Number of the generation: 1 for the first generation, and one more after each fault or resize."""
        self.step = 0
        """Newest committed step of this rank; 0 before the first commit."""
        self._link = link
        self._policy = config.checkpoint
        self._checkpointer = checkpointer
        self._watchdog = Watchdog(config, rank, link, checkpointer)
        self._kept: list[_Kept] = []
        self._cursor = 0
        self.early_steps = EarlySteps(refuse)
        self._held: dict[tuple[int, int], list[meshes.GroupHolder]] = {}
        """Objects from which process groups were removed, by the rank and the world size of those groups."""
        self._state: TrainingState | None = None
        self._restored = False
        self.groups_asleep: Callable[[], frozenset[str] | None] = lambda: None
        """Function that returns the names of process groups kept from earlier generations and unused in this one; or
        None if process groups do not outlive a generation."""
        self.steps_begin: Callable[[], None] = lambda: None
        """Function that is called each time `steps` begins its loop."""
        self.device_steps = DeviceSteps()
        """Steps that the asynchronous device, such as a GPU, has finished; the Python loop may run ahead of it."""
        self._unreported: deque[tuple[int, dict[str, Any]]] = deque()
        """Steps whose `step` event is not sent yet, because the device may not have finished the step; each with the
        fields of the event."""
        self._captured: tuple[CapturedState, ConsistentStep] | None = None
        """State at the last commit; None before the first commit."""
        self._saved = -1
        """Step of this rank's last snapshot in this generation; -1 if there is none."""
        self._warn = sys.stderr.write if local_rank == 0 else lambda _: None
        self.how_to_restore = (
            "Call run.restore(model=model, optimizer=optimizer) first, or write run.steps(total, **locals())."
        )
        """Hint of the error if the script has not restored its state. An adapter may replace this hint."""
        self._unsaved = UnsavedState(self._warn, self._record_unsaved)
        self._loop: Callable[[], Generator[int, None, None] | None] = lambda: None
        """Weak reference to the generator of the newest call of `steps`."""
        self._in_training = False
        """Whether the training function is running, so that a step can still end."""
        self._left_step = 0
        """Step whose body was left by `break` in the newest loop over steps; 0 if there is none."""
        self._not_raised: Exception | None = None
        """Error in the commit of a closed loop's last step, which is raised later, because `close` drops errors."""
        self._reported_kept: dict[str, Any] = {}
        """Fields of the last `kept` event, which lists the contents of snapshots."""
        self._objects: dict[str, Stateful] = {}
        """Registered objects by name."""
        self._parallel = DataParallel()
        self._order_matters: list[bool] = []
        """For each data-parallel wrapper of this generation, whether the order of additions changes its gradients."""
        self._gradients: gradients.Ranges = []
        """Ranges of the parameters that had a gradient at the last commit."""
        self._changes: Changes = {}
        """Changes of the registered objects other than values, such as `requires_grad` flags, at the last commit."""
        self._metrics: dict[str, float | None] = {}
        """Metrics that the script has logged in the current step."""
        self._in_step = False
        """Whether the body of a step is running."""
        self._last_total = 0
        """Argument `total` of the newest call of `steps` in this call of the training function; 0 before `steps` is
        called."""
        self._began = 0
        """Newest committed step when the newest loop over steps began."""
        self._blocked = 0.0
        """Seconds in the current step during which the training thread waited for a snapshot."""

    @property
    def batch_size(self) -> int:
        """This rank's share of the job's global_batch_size, in samples."""
        if self.config.global_batch_size is None:
            raise JobFailedError("batch_size: the job has no global_batch_size", hint="Set it in the job's spec.")
        restart = self.config.restart
        if restart.policy == "continue" and restart.samples == "fewer":
            return self.config.global_batch_size // self.full_size
        if restart.policy == "continue" and (ranks := _uneven(self.config.global_batch_size, self.full_size)):
            raise JobFailedError(
                f"batch_size: with restart.policy: continue, a fault may leave only {ranks} ranks, and "
                f"{self.config.global_batch_size} samples cannot be divided evenly among them",
                hint="Use ElasticDataLoader, which divides the samples and returns their weights; or write samples: "
                "fewer.",
            )
        return self.config.global_batch_size // self.world_size

    def keep(self, build: Callable[[], Kept]) -> Kept:
        """Return the result of `build`, which is called only once per process, so that its result survives faults.

        Random numbers that torch, Python and numpy draw in `build` and until the first step depend only on the job's
        seed, so that these numbers are equal on every rank and after a fault. Process groups and device meshes made by
        `build` are made again after a fault, and replace the old ones inside the kept objects.

        After a fault, `build` is called again on every rank if it communicates. If the job continues with another
        number of ranks, `build` is also called again if it made shards, meshes or groups. `restore` copies the state of
        the old result into the new result.
        """
        world = self._world
        known = self._kept[self._cursor] if self._cursor < len(self._kept) else None
        if known is not None and known.group != world and known.is_of_one_world:
            known.value, known = None, None  # free the old value first, because memory may not suffice for two
            self._held = {world: self._held.get(world, [])}
            if self._state is not None and self._state.is_sharded:
                self._state.forget()  # forget the state, because shards of another world size come from snapshots
        if known is None or known.made.talked or not meshes.can_be_kept():
            meshes.forget_meshes()  # FSDP2 refuses a tensor on an old mesh, even if the old mesh equals the new one
            seed_step(self.config.seed, 0, -1)
            with meshes.recording() as made, self.early_steps.allowed():
                value = build()
            self._kept[self._cursor : self._cursor + 1] = [_Kept(value, made, world)]
        else:
            meshes.repeat(known.made)
            known.value, known.group = meshes.of_now(known.value), world
        self._give_back()
        self._cursor += 1
        # seed again, so that later random numbers do not depend on whether `build` was called now
        seed_step(self.config.seed, 0, self._cursor)
        return self._kept[self._cursor - 1].value  # type: ignore[no-any-return]  # what build returned

    def restore(self, *, cast: bool = False, **objects: Stateful) -> int:
        """Register the objects that make up the state, and load the restored step into them.

        Collective: every rank takes part, with the same names.

        Args:
            cast: whether to convert the checkpoint's values to the dtype of a module's tensor; if False, a tensor whose
                dtype differs from the checkpoint's is an error.
            objects: models, optimizers and other objects with `state_dict` and `load_state_dict`, by name.

        Returns:
            The restored step; 0 at the start of the job.

        Raises:
            JobFailedError: an object cannot be saved, or was built differently on this rank.
            MemoryTierFullError: the memory tier has no room for snapshots of the objects.
        """
        if self._restored:
            raise JobFailedError(
                "restore() was called twice in one call of the training function",
                hint="Name all objects in one call: restore(model=..., optimizer=..., scheduler=...).",
            )
        return self._restore(objects, cast=cast)

    def _restore(self, objects: dict[str, Stateful], *, cast: bool = False) -> int:
        with self.early_steps.allowed():  # the `state_dict` of an optimizer may make a step, as TorchTitan's does
            return self._load(objects, cast=cast)

    def _load(self, objects: dict[str, Stateful], *, cast: bool = False) -> int:
        self._give_back()
        state = TrainingState(
            objects, before=self._state, may_change=self._may_change, before_change=self._wait_staged, cast=cast
        )
        self._objects = objects
        self._state = state  # drop the old state, which the restore may overwrite in part
        restored = self._link.restore(state, self._extras)
        state.set_flags(restored.extras.get("changes", {}))
        state.clear_gradients()
        state.give_gradients(restored.extras.get("gradients", []))
        self._watchdog.attach(objects)
        if self._checkpointer is not None:
            self._checkpointer.reserve(state.nbytes())
        self.step, self._restored = restored.step, True
        if restored.from_memory:
            self._unsaved.leave_to_others(restored.step)
        self._follow_device(device_of(state.take().parts.tensors))
        self._parallel.restore(restored.extras.get("ddp_buckets", {}))
        self._complete_parallel()
        return self.step

    @overload
    def data_parallel(
        self, module: torch.nn.Module, *, reproducible: Literal[True], init_sync: bool = ...
    ) -> Reproducible: ...

    @overload
    def data_parallel(self, module: torch.nn.Module, **options: Any) -> DistributedDataParallel: ...

    def data_parallel(self, module: torch.nn.Module, *, reproducible: bool = False, **options: Any) -> Any:
        """Return a `DistributedDataParallel(module, **options)` that adds gradients in the same order after a fault.

        If this method is called before `restore`, the wrapper can be used only after `restore` or `steps`. DDP's
        initial broadcast of parameters is skipped after a restore, because ranks then have equal values.

        Args:
            module: the module to wrap; with `reproducible`, it may be an FSDP2 module.
            reproducible: whether to return a `Reproducible` instead, which sums gradients independently of the order of
                additions, so that weights are bit for bit the same with any number of ranks; the script must call
                `reduce()` of this object before the optimizer's step.
            options: further arguments of the wrapper.
        """
        if reproducible and not self._restored:
            raise JobFailedError(
                "data_parallel(reproducible=True) was called before restore(), which may change which parameters need "
                "gradients",
                hint="Call run.restore(model=model, optimizer=optimizer) first.",
            )
        self._order_matters.append(not reproducible)
        if reproducible:
            from hyperpod_ext.runtime import reproducible as without_order

            options.setdefault("init_sync", self.step == 0)
            ordered = without_order.reproducible(module, **options)
            if self.config.restart.policy == "continue":
                ordered.after_backward = self._leave_if_over
            return ordered
        wrapped = self._parallel.add(module, **options)
        if self._restored:
            self._complete_parallel()
        return wrapped

    def _complete_parallel(self) -> None:
        """Complete the DDP wrappers. DDP broadcasts rank 0's values only at the job's start, because after a restore
        all ranks have equal values."""
        self._parallel.complete(self._objects.values(), init_sync=self.step == 0)

    def steps(self, total: int, /, **objects: Any) -> Iterator[int]:
        """Yield the numbers of the remaining steps, up to `total`. The first step of the job has number 1.

        Call `steps` once, unless the script loops over epochs. In a loop over epochs, call `run.steps((epoch + 1) *
        steps_per_epoch)` in each epoch, so that `total` grows.

        A step is committed when its loop body has ended, even if another iterator of a `zip` ends then. A step whose
        body was left by `break` is not committed. Before each step, the global random generators are seeded from (seed,
        step, rank).

        Args:
            total: number of steps of the whole job.
            objects: the script's objects, for example `**locals()`. If the script has not called `restore`, the objects
                that have a state are passed to `restore`. If the script has called it, they must be registered already.
        """
        self._register(objects)
        loop = self._steps(total)
        self._loop = weakref.ref(loop)
        # if no steps remain, run the generator here, because `zip` with an empty iterator would never start it
        return iter(list(loop)) if self._restored and total <= self.step else loop

    def epochs(self, loader: Any, epochs: int, /, **objects: Any) -> Iterator[tuple[int, Batches]]:
        """Yield the number, counted from 0, and the remaining batches of each unfinished epoch; each batch is one step.

        The `objects` are registered as in `steps`, together with the loader. The last step of an epoch is committed
        only after the script's work that follows the epoch's batches. After a fault in the work after the batches, the
        last batch and this work are repeated.

        Args:
            loader: a torch DataLoader with this rank's batches, whose number must be the same on every rank.
            epochs: number of epochs of the whole job.
            objects: the script's objects, for example `**locals()`.

        Raises:
            JobFailedError: the loader's batches have no index, as with an IterableDataset; or `restore` was called.
        """
        if self._restored:
            raise JobFailedError(
                "epochs() was called after restore() or steps()",
                hint="Register all objects here, with the loader: run.epochs(loader, epochs, **locals()).",
            )
        data = EpochData(loader, seed=self.config.seed, rank=self.rank, warn=self._warn)
        name = next((name for name, value in objects.items() if value is loader), "loader")
        self._restore(stateful(objects) | {name: data})
        return epochs_of(data, epochs, self.step, self.steps, self._prepare_step)

    def _prepare_step(self, step: int, *, is_last: bool) -> None:
        """Seed the random generators for `step` again, because the script may have drawn numbers since the step began.

        Before the last step of an epoch, also save the state of the previous step: a fault in the script's work after
        the last batch makes the job restore this state, which no process has any more.
        """
        if is_last and self._policy.tiers:
            self._save_committed()
        seed_step(self.config.seed, step, self.rank)

    def _register(self, objects: dict[str, Any]) -> None:
        if self._restored:
            check_registered(objects, self._objects)
        elif found := stateful(objects):
            self._restore(found)

    def _steps(self, total: int) -> Generator[int, None, None]:
        self._raise_of_last_loop()
        if not self._restored:
            raise JobFailedError(
                "steps() was called before restore()",
                hint=self.how_to_restore,
            )
        if total <= min(self._last_total, self.step):
            raise JobFailedError(
                f"run.steps({total}) was called again after step {self.step}, but its argument is the number of steps "
                f"of the whole job, and all {total} are made",
                hint="Call run.steps once, with the steps of all epochs. Or increase the argument with the epoch, "
                "counted from 0: run.steps((epoch + 1) * steps_per_epoch).",
            )
        self._last_total, self._left_step = total, 0
        self.early_steps.end()
        self.steps_begin()
        self._watchdog.begin_steps()
        self._began = self.step
        # look for iterators in a zip() with this loop only at a job's start: the search would slow down recoveries
        self._unsaved.begin(self._loop if self.step == 0 else lambda: None)
        self._commit(self.step)
        self._see_unsaved(_caller(sys._getframe()))
        sharing = self._captured[1].sharing if self._captured is not None else ""
        self._refuse_shards(sharing)
        reproducible = bool(self._order_matters) and not any(self._order_matters)
        self._link.event("begun", rank=self.rank, step=self.step, of=total, sharing=sharing, reproducible=reproducible)
        self._report_kept()
        self._link.stop_at_step.begin(self.step + 1, total)
        for step in range(self.step + 1, total + 1):
            began = time.monotonic()
            self._metrics, self._in_step, self._blocked = {}, True, 0.0
            seed_step(self.config.seed, step, self.rank)
            self._watchdog.begin_step(step)
            places = _places(_caller(sys._getframe()))
            try:
                yield step
            except GeneratorExit:
                self._in_step = False
                if self._is_complete(places):
                    self._end_closed(step, total, began)
                else:
                    # wait for the running copy, because after `break` the script may change the state unnoticed
                    self._wait_staged()
                    self._left_step = step
                raise
            finally:
                self._in_step = False
            self._end_step(step, total, began, _caller(sys._getframe()))
        self._end_steps(total)

    def _end_step(self, step: int, total: int, began: float, frame: FrameType | None) -> None:
        """Commit `step` after its loop body.

        Args:
            step: number of the step.
            total: number of steps of the whole job.
            began: time of the step's start, by `time.monotonic`.
            frame: stack frame of the script's loop; None if the loop is closed.
        """
        self._watchdog.end_step()
        try:
            self._commit(step)
        except Exception:
            if self.step == step:  # the step is committed even if its save failed, so other ranks may restore it
                self._report_step(step, total, began)
            raise
        self._report_step(step, total, began)
        if self.step == step:
            self._see_unsaved(frame)
        self._stop_after(step)

    def _end_steps(self, total: int) -> None:
        self._wait_done()
        self._wait_staged()
        self._watchdog.end_steps()
        self._save_last()
        seed_step(self.config.seed, total + 1, self.rank)  # so code after the loop draws the same numbers after a fault

    def _is_complete(self, places: Sequence[tuple[FrameType, int]]) -> bool:
        """Return whether the body of the step ended before the loop was closed, as in `zip(range(9), run.steps(9))`.

        The body of a step has ended if the calling frames are at the same instruction as at the start of the step, and
        the state has changed.

        Args:
            places: the calling frames and their instructions at the start of the step.
        """
        stands = bool(places) and all(frame.f_lasti == place for frame, place in places)
        return stands and self._in_training and self._state is not None and self._state.consistent_step() is None

    def _end_closed(self, step: int, total: int, began: float) -> None:
        """Commit the last step of a closed loop. Python drops an exception that is raised while an unfinished generator
        is deleted, so store the exception and raise it later."""
        try:
            self._end_step(step, total, began, None)
            self._end_steps(total)
        except Exception as error:
            self._not_raised = error

    def _raise_of_last_loop(self) -> None:
        error, self._not_raised = self._not_raised, None
        if error is not None:
            raise error

    def leave_out(self, *objects: Any) -> None:
        """Declare, before `steps` is called, that `objects` need no snapshot although they change from step to step.

        If training depends on one of these objects, the script itself must restore the object to `run.step`. A string
        among `objects` stands for the object that has this name in the log's warning.
        """
        self._unsaved.leave_out(objects)

    def guard(self, loss: torch.Tensor) -> None:
        """Check `loss` for NaN before its backward pass, so that the error can name this rank. If one rank has a NaN
        loss, the gradients of all ranks are NaN after the backward pass, and do not show which rank had this loss."""
        self._watchdog.see(loss)

    def log(self, **metrics: float | torch.Tensor) -> None:
        """Log metrics of the current step, or, outside of a step, of the whole run. NaN and infinity become null."""
        if captured := sorted(_RESERVED & set(metrics)):
            raise JobFailedError(
                f"log({captured[0]}=...): the event log itself uses this name", hint="Choose another name."
            )
        values = {name: _number(value) for name, value in metrics.items()}
        if self._in_step:
            self._metrics |= values
        else:
            self._link.event("metric", rank=self.rank, **values)

    # --- called for a script that saves and resumes by itself ------------------------------------

    @property
    def link(self) -> Link:
        return self._link

    def expect_step(self, step: int) -> None:
        """Begin `step` for hang detection, in a script that has its own loop over steps."""
        self._watchdog.begin_step(step)

    # --- called by the loop ---------------------------------------------------------------------

    def enter(
        self, generation: int, *, fresh: bool, memory_every: int | None = None, full_size: int | None = None
    ) -> None:
        """Begin a generation.

        Args:
            generation: number of the generation.
            fresh: whether no rank has a complete state, so that results of `keep` may be changed in part, and must be
                built again.
            memory_every: steps between two snapshots in memory, the same on every rank; None: the spec's value.
            full_size: number of ranks of the job when none is missing; None: no rank is missing now.
        """
        self.generation, self.full_size, self._order_matters = generation, full_size or self.world_size, []
        fewer = self.config.restart.policy == "continue" and self.config.restart.samples == "fewer"
        world.share_of(self.full_size if fewer else None)
        if memory_every is not None:
            self._policy = self.config.checkpoint.with_memory_every(memory_every)
        self._watchdog.enter(generation)
        self._cursor, self._restored, self._in_step, self._last_total = 0, False, False, 0
        self._in_training, self._left_step, self._not_raised = True, 0, None
        self._saved = -1  # steps that are repeated in this generation need new snapshots
        if fresh:
            self._kept, self._held, self._state, self.step = [], {}, None, 0
        if not self._kept:
            meshes.forget_meshes()  # the script makes new meshes, perhaps without `keep`
        seed_step(self.config.seed, 0, 0)

    def move(self, rank: int, world_size: int) -> None:
        """Change this process's rank or world size."""
        self.let_go()
        self.rank, self.world_size = rank, world_size
        self._watchdog.close()
        self._watchdog = Watchdog(self.config, rank, self._link, self._checkpointer)
        meshes.forget_meshes()

    def drop_aborted(self) -> None:
        """Wait for the device's queued work after an abort, and set `step` to the last step finished before it."""
        self._in_training = False
        self.device_steps.wait()
        self._report_done()
        self._unreported.clear()
        self.step = min(self.step, self.device_steps.finished())
        self._parallel.go_back(self.step)

    def check_returned(self, name: str) -> None:
        """Check the run after the training function `name` has returned.

        Raises:
            JobFailedError: the training function has not called `restore`, for which other ranks wait.
            Exception: the commit of the last step failed.
        """
        self._in_training = False
        if (loop := self._loop()) is not None:
            loop.close()
        self._raise_of_last_loop()
        if not self._restored:
            raise JobFailedError(
                f"{name}() returned without calling run.restore()",
                hint="Call it once, with everything that makes up the state, before the first step.",
            )
        if self._left_step > self.step and self._state is not None and self._state.may_differ:
            self._warn(
                f"hyperpod_ext: {name}() returned within step {self._left_step}, which is not committed: the newest "
                f"checkpoint has step {self.step} at most. A step is committed when the script requests the "
                "next step from run.steps. In zip(...), put run.steps first.\n"
            )

    def leave(self) -> None:
        """Leave a generation: remove its process groups from all objects that reference them."""
        self._watchdog.leave()
        self._unsaved.leave()
        self._parallel.leave()
        self._let_go(groups_last=self.groups_asleep() is not None)

    def let_go(self) -> None:
        """Remove process groups that outlive a generation, because this process no longer belongs to them."""
        if self.groups_asleep() is not None:
            self._let_go(groups_last=False)

    def _let_go(self, *, groups_last: bool) -> None:
        self._held.setdefault(self._world, []).extend(meshes.let_go(groups_last=groups_last))

    @property
    def _world(self) -> tuple[int, int]:
        return self.rank, self.world_size

    def _give_back(self) -> None:
        """Insert the new process groups into the objects that were made for this rank and this world size.

        Objects made for another world size stay recorded: the job may return to that world size before the training
        function has made new objects.
        """
        held = self._held.get(self._world, [])
        self._held[self._world] = meshes.give_back(held, self.groups_asleep() or ())

    def consistent_step(self) -> ConsistentStep | None:
        """Return the live state if it is complete, so that other ranks can restore from it; None otherwise."""
        consistent = self._state.consistent_step() if self._state is not None else None
        if consistent and self._checkpointer is not None and self._checkpointer.differing(consistent.save_id):
            return None
        return consistent if consistent is not None and consistent.step <= self.device_steps.finished() else None

    def digest(self) -> str:
        """Return the SHA-256 of the registered state, or an empty string if no state is registered."""
        self._watchdog.done()
        return self._state.digest() if self._state is not None else ""

    def _see_unsaved(self, frame: FrameType | None) -> None:
        if not self._unsaved.is_done and self._captured is not None:
            kept = [each.value for each in self._kept]
            self._unsaved.see(frame, kept, self._objects, self._captured[0].parts.tensors)

    def _report_kept(self) -> None:
        """Report the names and types of the objects in snapshots, on rank 0 and only if they have changed."""
        kept = {
            "objects": {name: type(each).__name__ for name, each in self._objects.items()},
            "left_out": self._unsaved.left_out,
        }
        if self.rank == 0 and kept != self._reported_kept:
            self._link.event("kept", rank=self.rank, **kept)
            self._reported_kept = kept

    def _record_unsaved(self, names: list[str], descriptive: list[str], unseeded: list[str]) -> None:
        if self.rank == 0:
            lists = {"objects": names, "descriptive": descriptive, "unseeded": unseeded}
            self._link.event("unsaved", rank=self.rank, **lists)

    def _report_step(self, step: int, total: int, began: float) -> None:
        """Queue the `step` event, with the seconds spent on data and snapshots, and send the events that are ready."""
        waited: dict[str, float] = {
            "data_s": round(self._watchdog.data_s, 6),
            "checkpoint_s": round(self._blocked, 6),
        }
        if self._saved == step:
            waited["snapshot"] = 1
        self._unreported.append((step, {"of": total, "began": began, **waited, **self._metrics}))
        self._report_done()

    def _report_done(self) -> None:
        """Send the `step` events of the steps that the device has finished. Steps that the device has not finished are
        not reported, because they may still be aborted."""
        steps = self.device_steps
        while self._unreported and (steps.device is None or self._unreported[0][0] <= steps.finished()):
            step, fields = self._unreported.popleft()
            self._link.event("step", rank=self.rank, step=step, **fields)

    def _wait_done(self) -> None:
        """Wait until the device has done all queued work.

        Raises:
            AbortedError: an abort came before the device had done all work.
        """
        if not self.device_steps.wait():
            raise AbortedError(f"generation {self.generation} is over")
        self._report_done()

    def _leave_if_over(self) -> None:
        """Stop between micro-batches if the generation is over, because the step's gradients can no longer be reduced.

        Raises:
            AbortedError: the generation is over.
        """
        if self._link.over:
            raise AbortedError(f"generation {self.generation} is over")

    def _refuse_shards(self, sharing: str) -> None:
        """Refuse a sharded state if the policy is that the job continues without lost ranks.

        Raises:
            JobFailedError: ranks hold shards, so the remaining ranks cannot continue without a lost rank.
        """
        if self.config.restart.policy == "continue" and ("shard" in sharing or ":" in sharing):
            raise JobFailedError(
                f"restart.policy: continue needs the whole state on every rank; rank {self.rank} holds a part of it "
                f"({sharing}), as with FSDP, HSDP or tensor parallelism",
                hint="Write restart.policy: wait, or train with DistributedDataParallel.",
            )

    def _may_change(self) -> None:
        """Check that an optimizer may change the state.

        Raises:
            AbortedError: collectives were aborted, so the optimizer's gradients are invalid.
        """
        if not self.device_steps.may_change():
            raise AbortedError(f"generation {self.generation} is over")

    def _follow_device(self, device: Device | None) -> None:
        """Set the asynchronous device that changes the state from now on; None: changes are synchronous."""
        self.device_steps.follow(device, self.step)
        self._watchdog.runs_ahead = device is not None
        if self._checkpointer is not None:
            self._checkpointer.follow(device, self.device_steps.is_good)

    def _commit(self, step: int) -> None:
        """Commit `step` on this rank, and make a snapshot if one is due."""
        if self._state is None or (step > self._began and self._state.accumulates()):
            return
        if step > 0:
            self._parallel.record(step)
        overlaps = self._state.tells_of_changes and (self._state.is_reported or step == self._began)
        # copy step 0 at once, because it must have a snapshot, and an overlapped copy is dropped if tensors change
        at_once = step == 0 or not overlaps
        captured = self._state.take(step_ended=True)
        self.device_steps.queue(step)
        # wait for the device, because the digest or the comparison reads tensors
        if captured.own or self._watchdog.compares(step):
            self._wait_done()
        self._watchdog.compare(step, captured)
        sharing = captured.sharing()
        world_size = 0 if sharing == "same" and not captured.is_sharded else self.world_size
        consistent = ConsistentStep(step, save_id_of(self.generation, step), captured.own_digest(), sharing, world_size)
        self._state.commit(captured, consistent)
        self._gradients, self._changes = self._state.existing_and_changed(captured)
        self.step, self._captured = step, (captured, consistent)
        saved = self._policy.due(step) and self._save(captured, consistent, at_once=at_once)
        if not saved and self._checkpointer is not None and self.config.checkpoint.peer() is not None:
            self._checkpointer.stepped()

    def _save(
        self, captured: CapturedState, consistent: ConsistentStep, *, at_once: bool, when_busy: WhenBusy | None = None
    ) -> bool:
        """Save a snapshot; return False if it was skipped."""
        if self._checkpointer is None:
            return False
        own, began = {id(tensor) for tensor in captured.own}, time.monotonic()
        saved = self._checkpointer.save(
            consistent.step,
            consistent.save_id,
            self.generation,
            captured.parts,
            self._extras() | {"sharing": consistent.sharing},
            own_digest=consistent.own_digest,
            changing=lambda tensor: id(tensor) in own,
            at_once=at_once,
            when_busy=when_busy,
        )
        self._blocked += time.monotonic() - began
        self._saved = consistent.step if saved else self._saved
        return saved

    def _stop_after(self, step: int) -> None:
        """Stop this rank if `step` is the step after which all ranks have agreed to stop for a resize.

        Raises:
            AbortedError: the job continues with other nodes; the training function is called again.
        """
        stop_at_step = self._link.stop_at_step
        if not stop_at_step.stops_after(step, consistent=self.step == step):
            return
        self._wait_done()
        self._watchdog.leave()
        if (
            self._checkpointer is not None
            and self._captured is not None
            and (stop_at_step.ends or self._captured[1].world_size)
        ):
            if self._saved != step:  # save now, because other ranks need parts of this rank's snapshot
                self._save(
                    *self._captured, at_once=True, when_busy=self._never_skipped if stop_at_step.ends else "wait"
                )
            self._see_saved()
        stop_at_step.stop(step)
        if self._link.over:
            raise AbortedError(f"generation {self.generation} is over: the job goes on with other nodes")

    def _save_last(self) -> None:
        """Save the last step for its upload to the durable tiers at the job's end, unless the step is already saved."""
        if self._checkpointer is not None and self._policy.durable():
            self._save_committed()
            self._checkpointer.flush()
        self._see_saved()

    def _save_committed(self) -> None:
        """Save the last committed step, unless it is already saved."""
        if (
            self._state is not None
            and self._captured is not None
            and self._saved != self.step
            and self._state.consistent_step() is self._captured[1]
        ):
            self._save(*self._captured, at_once=True, when_busy=self._never_skipped)

    @property
    def _never_skipped(self) -> WhenBusy | None:
        """Value of `when_busy` for a save that must not be skipped; None: the spec's value."""
        return "wait" if self._policy.when_busy == "skip" else None

    def _see_saved(self) -> None:
        """Wait until the memory server has the last snapshot completely, and save again if the memory server ends."""
        if self._checkpointer is None or self._captured is None or self._saved != self.step:
            return
        while not self._checkpointer.flush():
            self._save(*self._captured, at_once=True, when_busy="wait")

    def _wait_staged(self) -> None:
        """Before the state changes, wait until the running copy of the state has ended."""
        if self._checkpointer is not None:
            began = time.monotonic()
            if not self._checkpointer.wait_staged():
                self._saved = -1
            self._blocked += time.monotonic() - began

    def _extras(self) -> dict[str, Any]:
        return {"ddp_buckets": self._parallel.layouts, "gradients": self._gradients, "changes": self._changes}


def _uneven(batch: int, ranks: int) -> int:
    """Return the largest number of ranks, up to `ranks`, by which `batch` is not divisible; 0 if there is none."""
    return next((count for count in range(ranks, 0, -1) if batch % count), 0)


def _number(value: float | torch.Tensor) -> float | None:
    """Return `value` as a number for JSON, or None for NaN and infinity."""
    number = float(value)
    return number if math.isfinite(number) else None


def _caller(frame: FrameType) -> FrameType | None:
    """Return the stack frame of the script's loop over steps, or over the `Batches` of an epoch.

    Args:
        frame: stack frame of the generator that yields the steps.
    """
    caller = frame.f_back
    while caller is not None and caller.f_globals.get("__name__") == Batches.__module__:
        caller = caller.f_back
    return caller


def _places(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """Return `frame` and the script's frames above it, each with its current instruction.

    Frames of generators are left out, because a generator may be closed together with the loop.
    """
    found = []
    while frame is not None and not is_ours(str(frame.f_globals.get("__name__"))):
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            found.append((frame, frame.f_lasti))
        frame = frame.f_back
    return found
