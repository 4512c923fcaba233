"""`@resilient`: a training function that continues after a fault, in the same process if possible."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import HyperpodExtError, JobFailedError, NotFoundError, StaleGenerationError
from hyperpod_ext.runtime.checkpoint.checkpointer import Checkpointer
from hyperpod_ext.runtime.control_plane.agent import AbortedError, ControlPlane, Generation
from hyperpod_ext.runtime.control_plane.launcher import Launcher, find_launcher
from hyperpod_ext.runtime.control_plane.open import open_control_plane
from hyperpod_ext.runtime.detection.cuda_errors import unusable_context
from hyperpod_ext.runtime.detection.failure_causes import one_line, place_of
from hyperpod_ext.runtime.ipc import control_messages as c
from hyperpod_ext.runtime.ipc.environment import WorkerEnvironment
from hyperpod_ext.runtime.memory_server.client.client import MemoryClient
from hyperpod_ext.runtime.process_group.backend import AbortStuckError
from hyperpod_ext.runtime.process_group.gloo.waits import wait_until_idle
from hyperpod_ext.runtime.process_group.groups import TORCH_NAMES, ProcessGroups, choose
from hyperpod_ext.runtime.state import meshes
from hyperpod_ext.runtime.state.training_state import ConsistentStep
from hyperpod_ext.runtime.training.early_steps import unprotected_steps, warn_of_unprotected_steps
from hyperpod_ext.runtime.training.outside_values import OutsideValues
from hyperpod_ext.runtime.training.restore import JobLink, SoloLink
from hyperpod_ext.runtime.training.run import Run

Result = TypeVar("Result")

_ANSWER_LEASES = 2.0
"""Number of leases (`restart.lease_s`) that a rank with a broken collective waits for an abort before it reports the
broken collective as its own failure. Within one lease, the coordinator reports the loss of any node, even if a new
coordinator must be elected.
"""

_NEWS_S = 0.25
"""Seconds that a rank with a broken collective waits for an abort before it logs the event `collective_broke`. An abort
comes if the death of another rank was reported."""

_finished: list[str] = []
"""Names of the training functions that have ended in this process."""


def resilient(train: Callable[[Run], Result]) -> Callable[[], Result]:
    """Make `train(run)` survive faults of any rank. The decorated function takes no argument.

    A fault ends the current call of `train` on every rank. Dead processes are replaced, the other processes continue,
    and `train` is called again; in a process that continues, `train` gets the same `Run` as before. The launcher
    determines which faults are handled: see docs/launchers.md. If the script is started with plain `python`, `train`
    runs once, as a job of one rank with batches of one sample, which is enough to debug the script.

    Raises:
        JobFailedError: `train` is a generator or a coroutine, so that a call of `train` would do nothing.
    """
    if inspect.isgeneratorfunction(train) or inspect.iscoroutinefunction(train):
        raise JobFailedError(
            f"{_name(train)}() is a generator or a coroutine, so calling it runs nothing",
            hint="Write a plain function, without `yield` and `async`.",
        )

    @functools.wraps(train)
    def resilient_train() -> Result:
        unprotected_steps.end()
        launcher = find_launcher()
        if launcher is None:
            return _run_alone(train)
        if _finished:
            raise JobFailedError(
                f"{_name(train)}() was called after {_finished[0]}() had ended; a job has one training function",
                hint="Do everything that needs all ranks in one call.",
            )
        groups = ProcessGroups()
        try:
            result = _Loop(open_control_plane(launcher, groups), groups).until_finished(train)
        except HyperpodExtError as error:
            if launcher is Launcher.AGENT:  # under our agent, `worker_main` prints the error
                raise
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            raise SystemExit(error.exit_code) from None
        _finished.append(_name(train))
        return result

    return resilient_train


@dataclass(frozen=True, slots=True)
class _Member:
    """This process in its role as one rank of the job, with its clients and its `Run`."""

    environment: WorkerEnvironment
    client: MemoryClient
    checkpointer: Checkpointer
    link: JobLink
    run: Run

    @classmethod
    def of(cls, environment: WorkerEnvironment, session: ControlPlane) -> _Member:
        rank, config = environment.rank, environment.config
        client = MemoryClient(environment.memory_socket, another=bool(environment.agent_socket))
        checkpointer = Checkpointer(
            client,
            rank,
            world_size=environment.world_size,
            job=config.name,
            secret=environment.secret,
            overlap=config.checkpoint.overlap,
            when_busy=config.checkpoint.when_busy,
            encrypted=config.encrypted,
        )
        link = JobLink(session, rank, checkpointer)
        run = Run(config, rank, environment.local_rank, link, checkpointer, environment.world_size)
        return cls(environment, client, checkpointer, link, run)

    def moved(self, environment: WorkerEnvironment) -> _Member:
        """Change the rank or the world size of the process, and return its new `_Member`."""
        self.checkpointer.move(environment.rank, environment.world_size)
        self.link.rank = environment.rank
        self.run.move(environment.rank, environment.world_size)
        return replace(self, environment=environment)


class _Loop:
    """The loop of one worker: join a generation, open process groups and train; after a fault, start over."""

    def __init__(self, session: ControlPlane, groups: ProcessGroups) -> None:
        self._session, self._groups = session, groups
        self._member: _Member | None = None
        self._live: ConsistentStep | None = None
        """The complete state of this process when it left the last generation; None if the state was not complete."""
        self._outside = OutsideValues(sys.stderr.write)
        if session.environment is not None:  # create the member now, before other ranks wait
            self._become(session.environment)

    def until_finished(self, train: Callable[[Run], Result]) -> Result:
        while True:
            generation = self._session.join(self._live)
            environment = self._session.environment
            assert environment is not None, "it has joined"
            member = self._move(environment) if generation.moved and self._member else self._become(environment)
            try:
                self._enter(generation, member)
                self._outside.enter(train)
                member.run.steps_begin = self._outside.begin_steps
                with member.run.early_steps:
                    result = train(member.run)
                member.run.check_returned(_name(train))
                self._session.finished(member.run.digest())
            except (Exception, SystemExit) as error:
                if not self._leave(error, member):
                    raise
            else:
                member.run.leave()
                self._groups.close()
                return result

    def _become(self, environment: WorkerEnvironment) -> _Member:
        """Return the member for this process's rank. If the rank has changed, make a new member without a state."""
        if self._member is None or self._member.environment != environment:
            if self._member is not None:
                self._member.client.close()
                self._member.run.let_go()
                meshes.forget_meshes()
            self._member = _Member.of(environment, self._session)
        return self._member

    def _move(self, environment: WorkerEnvironment) -> _Member:
        """Give the process another rank or world size, but keep its state."""
        assert self._member is not None
        self._member = self._member.moved(environment)
        return self._member

    def _enter(self, generation: Generation, member: _Member) -> None:
        rank, store = member.environment.rank, self._session.open_store(generation)
        member.run.device_steps.enter()
        self._groups.before_abort = member.run.device_steps.freeze
        member.run.groups_asleep = self._groups.asleep
        wanted = member.environment.config.process_group_backend
        self._groups.open(store, rank, member.environment.world_size, choose(wanted))
        if self._session.aborted:  # end here: an earlier abort had no effect on these new groups
            raise AbortedError(f"generation {generation.number} is over")
        member.link.enter(generation.decision, store, generation.peers)
        fresh = generation.decision.source(rank).kind == "fresh"
        member.run.enter(
            generation.number, fresh=fresh, memory_every=generation.memory_every, full_size=generation.full_size
        )
        self._session.event("groups_open", rank=rank)

    def _leave(self, error: Exception | SystemExit, member: _Member) -> bool:
        """Leave the generation after `error`, and report `error` if this rank caused it.

        Returns False if the process must end.
        """
        unusable = unusable_context(error) is not None
        if unusable or not self._is_someone_elses(error, member):
            traceback.print_exception(error)
            if not self._report(error, member):
                return False
            self._session.wait_aborted(timeout_s=None)
        # abort first, because work and copies that are queued behind a collective can end only after the abort
        self._groups.abort()
        # complete the last save if it is still accepted, so that this rank can offer the snapshot for the restore
        with contextlib.suppress(StaleGenerationError, NotFoundError):
            member.checkpointer.flush()
        member.run.drop_aborted()
        self._session.event("aborted", rank=member.environment.rank, step=member.run.step)
        self._live = self._look_at_state(member)
        # the failed call's frames would keep the DDP module alive, with gradient hooks and the process group's sockets
        _forget_frames(error)
        member.run.leave()
        try:
            self._groups.leave()
        except AbortStuckError as stuck:
            return self._report(stuck, member)
        return True

    def _look_at_state(self, member: _Member) -> ConsistentStep | None:
        """Return the live state, if it is complete.

        Call this method before the process groups are closed, because the script's `state_dict` methods may use the
        groups. If a `state_dict` method communicates, it raises an error here, and this rank offers no state.
        """
        try:
            return member.run.consistent_step()
        except Exception as error:
            sys.stderr.write(
                f"the live state of rank {member.environment.rank} cannot be read after a fault, so the rank is "
                f"restored from another copy: {one_line(error)}\n"
            )
            return None

    def _report(self, error: BaseException, member: _Member) -> bool:
        """Report this rank's failure; return whether the process continues.

        If the process is unusable, this method does not return: the launcher kills the process.
        """
        failure = _failure(error, member.run.step + 1)
        stays = self._session.failed(failure)
        if stays and failure.process_unusable:
            threading.Event().wait()
        return stays

    def _is_someone_elses(self, error: BaseException, member: _Member) -> bool:
        if self._session.aborted or isinstance(error, AbortedError):
            return True
        lease_s, step = member.environment.config.restart.lease_s, member.run.step + 1
        if not isinstance(error, ConnectionError | StaleGenerationError) and not self._groups.is_broken(error):
            return False
        if self._session.wait_aborted(_NEWS_S):
            return True
        self._session.event("collective_broke", rank=member.environment.rank, step=step, cause=one_line(error))
        return self._session.wait_aborted(_ANSWER_LEASES * lease_s)


def _failure(error: BaseException, step: int) -> c.Failed:
    """Return the failure report for an exception that was raised in `step`."""
    ours = error if isinstance(error, HyperpodExtError) else None
    hint = ours.hint if ours is not None else ""
    if (cuda_error := unusable_context(error)) is not None:
        hint = f"{cuda_error.name}: after this error a process cannot use its GPU any more, so a new one replaces it."
    return c.Failed(
        cause=one_line(error),
        step=step,
        final=ours is not None,
        code=type(error).__name__ if ours is not None else "JobFailedError",
        hint=hint,
        place=place_of(error),
        process_unusable=cuda_error is not None or isinstance(error, AbortStuckError),
    )


def _forget_frames(error: BaseException | None) -> None:
    """Clear the local variables of every frame in the tracebacks of `error` and of the exceptions that caused it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _name(train: Callable[..., object]) -> str:
    return getattr(train, "__name__", "the training function")  # callable objects may have no `__name__`


def _run_alone(train: Callable[[Run], Result]) -> Result:
    config = RuntimeConfig(name="alone", nodes=1, workers_per_node=1, global_batch_size=1)
    dist.init_process_group(TORCH_NAMES[choose(None)], store=HashStore(), rank=0, world_size=1)
    try:
        run = Run(config, 0, 0, SoloLink(), None)
        run.enter(1, fresh=True)
        with run.early_steps:
            result = train(run)
        run.check_returned(_name(train))
        return result
    finally:
        wait_until_idle()
        dist.destroy_process_group()


warn_of_unprotected_steps()  # call this at import, so that forked workers inherit the check
