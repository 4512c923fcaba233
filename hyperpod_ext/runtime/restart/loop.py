"""`@resilient`: a training function that goes on after a fault, in the same process where it can."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from hyperpod_ext.config.runtime import RuntimeConfig
from hyperpod_ext.errors import HyperpodExtError, JobFailedError, NotFoundError, StaleGenerationError
from hyperpod_ext.runtime.causes import one_line
from hyperpod_ext.runtime.checkpoint.checkpointer import Checkpointer
from hyperpod_ext.runtime.environment import WorkerEnvironment
from hyperpod_ext.runtime.memory_server.client import MemoryClient
from hyperpod_ext.runtime.rendezvous.groups import ProcessGroups
from hyperpod_ext.runtime.rendezvous.store import PartitionedStore
from hyperpod_ext.runtime.restart.link import JobLink, SoloLink
from hyperpod_ext.runtime.restart.run import Run
from hyperpod_ext.runtime.restart.session import AbortedError, Generation, Session

Result = TypeVar("Result")

_VERDICT_WAIT_S = 30.0
"""How long a rank whose collective broke waits to hear which rank failed, before it takes the blame."""

_finished: list[str] = []
"""Training functions of this process that have ended."""

_BROKEN_GROUP = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")


def resilient(train: Callable[[Run], Result]) -> Callable[[], Result]:
    """Make `train(run)` survive faults of any rank. The decorated function takes no argument.

    Under our agent, a fault ends the current call of `train` on every rank; the failed process is
    replaced, the others stay, and `train` is called again with the same `Run`. In plain `python` it
    runs once, as a job of one rank with batches of one sample: enough to debug a script.
    """

    @functools.wraps(train)
    def resilient_train() -> Result:
        environment = WorkerEnvironment.of()
        if environment is None:
            return _run_alone(train)
        if _finished:
            raise JobFailedError(
                f"{train.__name__}() was called after {_finished[0]}() had ended; a job has one training function",
                hint="Do everything that needs all ranks in one call.",
            )
        result = _Loop(environment).until_finished(train)
        _finished.append(train.__name__)
        return result

    return resilient_train


class _Loop:
    """One worker's life: join, open groups, train, and after a fault again."""

    def __init__(self, environment: WorkerEnvironment) -> None:
        self._environment = environment
        self._groups = ProcessGroups()
        self._session = Session(environment, self._groups)
        self._checkpointer = Checkpointer(
            MemoryClient(environment.memory_socket),
            environment.rank,
            world_size=environment.world_size,
            job=environment.config.name,
            secret=environment.secret,
            overlap=environment.config.checkpoint.overlap,
            when_busy=environment.config.checkpoint.when_busy,
        )
        self._link = JobLink(self._session, environment.rank, self._checkpointer)
        self._run = Run(environment.config, environment.rank, environment.local_rank, self._link, self._checkpointer)

    def until_finished(self, train: Callable[[Run], Result]) -> Result:
        while True:
            generation = self._session.join(self._run.whole())
            try:
                self._enter(generation)
                result = train(self._run)
                self._session.finished(self._run.digest())
            except (Exception, SystemExit) as error:
                self._leave(error)
            else:
                self._run.leave()
                self._groups.close()
                return result

    def _enter(self, generation: Generation) -> None:
        rank, world_size = self._environment.rank, self._environment.world_size
        store = PartitionedStore(generation.addresses, generation.number, self._environment.secret)
        self._groups.open(store, rank, world_size)
        if self._session.aborted:  # word of it came before there was a group to cut
            raise AbortedError(f"generation {generation.number} is over")
        self._link.enter(generation.decision, store, generation.peers)
        self._run.enter(generation.number, fresh=generation.decision.source(rank).kind == "fresh")
        self._session.event("groups_open", rank=rank)

    def _leave(self, error: Exception | SystemExit) -> None:
        """Find out whose fault it was, say so if it was ours, and let go of the generation."""
        if not self._is_someone_elses(error):
            traceback.print_exception(error)
            self._session.failed(
                one_line(error),
                self._run.step + 1,
                final=isinstance(error, HyperpodExtError),
                code=type(error).__name__ if isinstance(error, HyperpodExtError) else "JobFailedError",
                hint=error.hint if isinstance(error, HyperpodExtError) else "",
            )
            self._session.wait_aborted(timeout_s=None)
        with contextlib.suppress(StaleGenerationError, NotFoundError):  # a save that came too late: it never happened
            self._checkpointer.flush()  # what this rank can offer from memory includes its last save
        self._session.event("freed", rank=self._environment.rank, step=self._run.step)
        # frames of the failed call hold the DDP module, and it the group's sockets and gradient hooks
        _forget_frames(error)
        self._run.leave()
        self._groups.cut()
        self._groups.destroy()

    def _is_someone_elses(self, error: BaseException) -> bool:
        if self._session.aborted or isinstance(error, AbortedError):
            return True
        broken = isinstance(error, ConnectionError | StaleGenerationError | dist.DistError) or (
            isinstance(error, RuntimeError) and any(sign in str(error) for sign in _BROKEN_GROUP)
        )
        return broken and self._session.wait_aborted(_VERDICT_WAIT_S)


def _forget_frames(error: BaseException | None) -> None:
    """Empty the local variables of every frame that `error`, or what caused it, passed through."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _run_alone(train: Callable[[Run], Result]) -> Result:
    config = RuntimeConfig(name="alone", nodes=1, workers_per_node=1, global_batch_size=1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        run = Run(config, 0, 0, SoloLink(), None)
        run.enter(1, fresh=True)
        return train(run)
    finally:
        dist.destroy_process_group()
