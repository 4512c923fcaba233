"""Reads planned steps' micro-batches in this thread, other threads or other processes. Yields results in order."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.processes import die_with_parent
from hyperpod_ext.runtime.data.fetching import Fetch, Fetched, Task
from hyperpod_ext.runtime.data.positions import GHOST, StepPlan

Read = tuple[StepPlan, list[Fetched]]


def in_this_thread(fetch: Fetch, plans: Iterator[StepPlan]) -> Generator[Read]:
    """Read each step only when the caller requests it, in the calling thread."""
    for plan in plans:
        yield plan, fetch.aside(_tasks(plan))


def in_threads(fetch: Fetch, plans: Iterator[StepPlan], workers: int, prefetch: int) -> Generator[Read]:
    """Read up to `prefetch` steps ahead in threads. Does not seed random generators, which threads share."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="hpx-data")
    ahead: deque[tuple[StepPlan, list[Future[Fetched]]]] = deque()
    try:
        while True:
            for plan in itertools.islice(plans, prefetch + 1 - len(ahead)):
                ahead.append((plan, [pool.submit(fetch, task) for task in _tasks(plan)]))
            if not ahead:
                return
            plan, futures = ahead.popleft()
            yield plan, [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def in_processes(
    fetch: Fetch,
    plans: Iterator[StepPlan],
    workers: int,
    prefetch: int,
    start_method: str | None,
    init: Callable[[int], object] | None = None,
) -> Generator[Read]:
    """Read up to `prefetch` steps ahead in worker processes of torch's DataLoader. `init`: called in each worker
    process with its number.

    Raises:
        RuntimeError: a worker process was killed. The job repeats the step, as after any other fault.
        JobFailedError: a worker process ended without being killed.
    """
    import torch
    from torch.utils.data import DataLoader

    first = next(plans, None)
    if first is None:
        return
    given: deque[StepPlan] = deque()

    def tasks() -> Iterator[Task]:
        for plan in itertools.chain([first], plans):
            given.append(plan)
            yield from _tasks(plan)

    each = max(1, -(-prefetch * max(1, len(first.slots)) // workers))
    loader: DataLoader[Any] = DataLoader(
        _Seeded(fetch),  # type: ignore[arg-type]  # by task, not by number
        batch_size=None,
        sampler=tasks(),
        num_workers=workers,
        prefetch_factor=each,
        collate_fn=_as_it_is,  # type: ignore[arg-type]  # receives one task's result, without a batch_size
        multiprocessing_context=start_method,
        # without this generator, the iterator would draw a seed from torch's global generator, and dropout in the first
        # step after a restart would differ
        generator=torch.Generator(),
        worker_init_fn=functools.partial(_begin, os.getpid() if _forks(start_method) else None, init),
    )
    read: Any = iter(loader)
    try:
        while True:
            fetched: list[Fetched] = []
            while not given or len(fetched) < len(given[0].slots):
                try:
                    fetched.append(next(read))
                except StopIteration:
                    if not given:
                        return
                    raise JobFailedError(
                        f"a worker process of the loader ended before it had read step {given[0].cursor.step + 1}",
                        hint="The log of this rank shows the worker's output.",
                    ) from None
                except RuntimeError as error:  # torch raises RuntimeError for a dead worker
                    raise RuntimeError(
                        f"reading step {given[0].cursor.step + 1}: {str(error).splitlines()[0]} "
                        "If a worker process was killed, see whether memory or /dev/shm is short."
                    ) from error
            yield given.popleft(), fetched
    finally:
        if hasattr(read, "_shutdown_workers"):
            read._shutdown_workers()


def _forks(start_method: str | None) -> bool:
    """Return whether worker processes are forked from the main thread, so that they can end together with the
    parent."""
    method = start_method or multiprocessing.get_start_method()
    return method == "fork" and threading.current_thread() is threading.main_thread()


def _begin(parent_pid: int | None, init: Callable[[int], object] | None, worker: int) -> None:
    """Make this worker process die together with its parent, and call `init`.

    torch's worker processes check only every five seconds whether their parent is dead, and keep the parent's sockets
    open until then. Without `die_with_parent`, other ranks would wait for the dead rank for up to five seconds.
    """
    if parent_pid is not None:
        die_with_parent(parent_pid)
    if init is not None:
        init(worker)


class _Seeded:
    """Wraps a `Fetch` as a dataset whose indices are tasks."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def __getitem__(self, task: Task) -> Fetched:
        return self._fetch.seeded(task)


def _as_it_is(fetched: Fetched) -> Fetched:
    return fetched


def _tasks(plan: StepPlan) -> list[Task]:
    number = plan.cursor.step + 1
    return [Task(number, slot.index, slot.ids, slot.index != GHOST) for slot in plan.slots]
