"""Reads a torch DataLoader so that a step that is repeated after a fault has the same samples.

The loader's batch sampler, dataset and `collate_fn` make the batches. Random numbers of samples depend only on the
seed, the rank, the epoch and the step, so that another process can repeat a step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.data.fetching import Fetch, seeded_aside
from hyperpod_ext.runtime.data.positions import Cursor, Extent, Slot, StepPlan
from hyperpod_ext.runtime.data.workers import Read, in_processes, in_this_thread


class EpochReader:
    """Reads the batches of `loader` for this rank, epoch by epoch.

    Args:
        loader: a `DataLoader`, or Accelerate's wrapper around one, that yields this rank's batches.
        seed: seed for samplers and for random numbers in samples, the same on every rank.
        rank: rank of this process; random numbers in samples differ between ranks.
        per_step: number of batches per optimizer step; the last step of an epoch may have fewer.

    Raises:
        JobFailedError: the loader has no batch sampler, or its class overrides how batches are read.
    """

    def __init__(self, loader: Any, *, seed: int, rank: int, per_step: int) -> None:
        base = getattr(loader, "base_dataloader", loader)
        if (reason := _unreadable(loader, base)) is not None:
            raise JobFailedError(
                f"the training data comes from a {type(loader).__name__} over {_kind_of_data(base)}: {reason}, so "
                "samples would repeat after a fault",
                hint="Give a dataset with __len__ and __getitem__, in a torch DataLoader with a batch sampler; or "
                "write the loop with run.steps and an ElasticDataLoader.",
            )
        self.loader, self.dataset, self._sampler = loader, base.dataset, loader.batch_sampler
        self._fetch = Fetch(self.dataset, base.collate_fn, seed, "fail")
        self._workers, self._prefetch = base.num_workers, base.prefetch_factor or 2
        context = base.multiprocessing_context
        self._start_method = None if context is None else context.get_start_method()
        self._init = base.worker_init_fn
        self._seed, self._rank, self._per_step = seed, rank, per_step
        self.begun = 0
        """Number of epochs that this process has begun to draw from the sampler."""

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.loader) // self._per_step)

    def must_be_same(self) -> dict[str, Any]:
        """Return the values that must be equal on every rank, and that a restore must not change."""
        kinds = [type(sampler).__name__ for sampler in chain_of(self._sampler)]
        return {
            "fingerprint": self._fingerprint(),
            "order": "/".join(kinds),
            "seed": self._seed,
            "steps_per_epoch": self.steps_per_epoch,
        }

    def check_same(self, state: dict[str, Any]) -> None:
        """Compare the present values of `must_be_same` with the values saved in `state`.

        Raises:
            JobFailedError: the dataset, the sampler, the seed or the number of steps per epoch has changed.
        """
        for name, now in self.must_be_same().items():
            if state.get(name) != now:
                raise JobFailedError(
                    f"the training data's {name} is {now!r} here and {state.get(name)!r} in the saved run: samples "
                    "would repeat, and others would be left out",
                    hint="Use the data and arguments of the saved run, or start a new run.",
                )

    def read(self, epoch: int, made: int) -> Generator[Read]:
        """Yield the steps of an epoch after its first `made` steps, whose samples are not read.

        Raises:
            JobFailedError: a sample cannot be read, or this process has begun the epoch before.
        """
        if epoch < self.begun:
            raise JobFailedError(
                f"epoch {epoch} of the training data was requested twice", hint="Make a new trainer for each fit."
            )
        while self.begun < epoch:  # replay earlier epochs, because a sampler's generator continues across epochs
            for _ in self._steps_of(self.begun):
                pass
        reading = self._read(self._plans(epoch, islice(self._steps_of(epoch), made, None), made))
        try:
            for plan, fetched in reading:
                if failure := next((one.failure for one in fetched if one.failure), ""):
                    raise JobFailedError(
                        f"epoch {epoch}, step {plan.cursor.step + 1}, rank {self._rank}: {failure}",
                        hint="Correct the sample, or leave it out of the dataset.",
                    )
                yield plan, fetched
        finally:
            reading.close()

    def begin_epoch(self, epoch: int) -> None:
        """Set the epoch of each sampler that has `set_epoch`."""
        for each in (self.loader, getattr(self._sampler, "batch_sampler", None)):
            if callable(getattr(each, "set_epoch", None)):
                each.set_epoch(epoch)  # type: ignore[union-attr]  # the line above has checked it

    def _fingerprint(self) -> str:
        """Return an identification of the dataset: its type, its fingerprint or else its columns, and its length.

        Does not use a datasets.Dataset's `_fingerprint`, which is random after `map` with an unhashable function."""
        own = getattr(self.dataset, "fingerprint", None) or getattr(self.dataset, "column_names", None)
        return f"{type(self.dataset).__name__}/{own or ''}/{len(self.dataset)}"

    def _read(self, plans: Iterator[StepPlan]) -> Generator[Read]:
        if self._workers == 0:
            return in_this_thread(self._fetch, plans)
        return in_processes(self._fetch, plans, self._workers, self._prefetch, self._start_method, self._init)

    def _plans(self, epoch: int, steps: Iterator[list[Any]], made: int) -> Iterator[StepPlan]:
        for number, batches in enumerate(steps, made):
            at = Cursor(epoch, 0, epoch * self.steps_per_epoch + number)
            first = self._rank * self._per_step
            slots = [Slot(first + index, ids, 1.0) for index, ids in enumerate(batches)]
            yield StepPlan(at, at, Extent(0, len(batches)), slots, 0)

    def _steps_of(self, epoch: int) -> Iterator[list[Any]]:
        """Yield the sample numbers of each step's batches, for all steps of an epoch."""
        self.begun = epoch + 1
        self.begin_epoch(epoch)
        batches = seeded_aside(lambda: iter(self._sampler), *self.order_key, epoch, 0)
        take: Callable[[], list[Any]] = lambda: list(islice(batches, self._per_step))  # noqa: E731
        for number in range(self.most_steps):
            if not (step := seeded_aside(take, *self.order_key, epoch, number + 1)):
                return
            yield step

    @property
    def order_key(self) -> tuple[int, ...]:
        """Seed, the same on all ranks, of the global random generators from which samplers draw."""
        return (self._seed,)

    @property
    def most_steps(self) -> int:
        """Maximum number of steps to read in one epoch."""
        return self.steps_per_epoch


def chain_of(sampler: Any) -> list[Any]:
    """Return a batch sampler, followed by the samplers that it wraps."""
    found: list[Any] = []
    while sampler is not None and len(found) < 6:
        found.append(sampler)
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return found


def _unreadable(loader: Any, base: Any) -> str | None:
    """Return why the loader's batches cannot be read by sample number; None if they can be."""
    if not isinstance(base, DataLoader):
        return "it is not a torch DataLoader"
    if isinstance(base.dataset, IterableDataset) or not hasattr(type(base.dataset), "__getitem__"):
        return "the dataset has no access to a sample by its number"
    if base.batch_sampler is None:
        return "it has no batch sampler"
    if type(base).__iter__ is not DataLoader.__iter__:
        return f"{type(base).__name__} reads batches with code of its own"
    if hasattr(loader, "_fetch_batches"):
        return "rank 0 reads for all ranks (dispatch_batches)"
    return None


def _kind_of_data(base: Any) -> str:
    return type(getattr(base, "dataset", None)).__name__
