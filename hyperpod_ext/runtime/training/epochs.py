"""Epochs of `run.epochs`: a torch DataLoader's batches, one batch per step, that continue exactly after a fault."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.data.epoch_reader import EpochReader, chain_of
from hyperpod_ext.runtime.data.workers import Read
from hyperpod_ext.runtime.state.unsaved.fingerprints import is_number
from hyperpod_ext.runtime.state.unsaved.reachable import Named, anything, own_values, reachable, script_frames

_ALONE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Classes of samplers that do not divide the samples among ranks, so that each rank gets its own random order."""


class EpochData(EpochReader):
    """The DataLoader of `run.epochs`, with one batch per step.

    `state_dict` has only values that must be equal after a restore, and no position.

    The class reads a copy of the loader's samplers. Without a copy, samplers that count epochs would differ after a
    fault: a surviving process has counted earlier epochs, but a new process has not.
    """

    def __init__(self, loader: Any, *, seed: int, rank: int, warn: Callable[[str], object]) -> None:
        super().__init__(loader, seed=seed, rank=rank, per_step=1)
        self.warn = warn
        self._given = self._sampler
        self._settings = _settings(self._given)
        self._sampler = _copied(self._given, self.dataset)

    def state_dict(self) -> dict[str, Any]:
        return self.must_be_same()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise JobFailedError if this loader's dataset or settings differ from those of the saved run."""
        self.check_same(state)

    def begin_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the dataset and of each sampler, if they have this method.

        Raises:
            JobFailedError: the script has changed a sampler since `run.epochs` was called.
        """
        for name, now in _settings(self._given).items():
            if (before := self._settings.get(name)) != now:
                raise JobFailedError(
                    f"{name} of the training data's sampler was {before!r} when run.epochs was called, and is {now!r} "
                    f"before epoch {epoch}; this change has no effect",
                    hint="Let the sampler's choice depend on its epoch: set_epoch(epoch) is called before each epoch.",
                )
        for each in (self.dataset, *chain_of(self._sampler)):
            if callable(getattr(each, "set_epoch", None)):
                each.set_epoch(epoch)

    def read(self, epoch: int, made: int) -> Generator[Read]:
        if self._is_pure:  # the orders of earlier epochs do not affect this epoch, and need not be drawn
            self.begun = epoch
        return super().read(epoch, made)

    @property
    def _is_pure(self) -> bool:
        """Whether the order of samples in an epoch depends only on the epoch's number and global random generators."""
        return all(
            type(each).__module__.startswith("torch.utils.data") and getattr(each, "generator", None) is None
            for each in chain_of(self._sampler)
        )

    @property
    def order_key(self) -> tuple[int, ...]:
        is_divided = hasattr(self.loader, "base_dataloader")  # Accelerate's wrapper takes this rank's part of the order
        alone = type(chain_of(self._sampler)[-1]) in _ALONE and not is_divided
        return (self._seed, self._rank) if alone else (self._seed,)

    @property
    def most_steps(self) -> int:
        return self.steps_per_epoch + 1  # allow one more step, to detect a loader with a wrong length


class PrepareStep(Protocol):
    """Function that is called before the script gets a batch."""

    def __call__(self, step: int, *, is_last: bool) -> None: ...


class Batches:
    """The remaining batches of one epoch, one batch per step, which can be iterated only once.

    `first`: number of the epoch's batches that earlier steps have used, for `enumerate(batches, batches.first)`.
    """

    def __init__(self, epoch: int, step: int, data: EpochData, steps: Iterator[int], prepare: PrepareStep) -> None:
        self.epoch, self.first = epoch, step - 1 - epoch * data.steps_per_epoch
        self.handed = self.first
        """Number of this epoch's batches that the script has received, including those of earlier steps."""
        self.place: Callable[[Any], Any] = lambda batch: batch
        """Function that moves a batch to the device; by default, batches stay on the CPU."""
        self._iterator: Callable[[], Generator[Any] | None] = lambda: None
        self._step, self._data, self._steps, self._prepare = step, data, steps, prepare

    def __len__(self) -> int:
        return self._data.steps_per_epoch - self.first

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches.

        Raises:
            JobFailedError: the batches were iterated before, or their number differs from the loader's length.
        """
        batches = self._iterate()
        self._iterator = weakref.ref(batches)
        return batches

    def _iterate(self) -> Generator[Any]:
        if self.handed > self.first:
            raise JobFailedError(
                f"the batches of epoch {self.epoch} were iterated twice, but each batch is one step",
                hint="For another pass over the data, iterate over the DataLoader in place of `batches`.",
            )
        batches, length = self._data.read(self.epoch, self.first), self._data.steps_per_epoch
        try:
            while self.handed < length:
                if self.handed > self.first:
                    self._step = next(self._steps)
                self.handed += 1
                if (read := next(batches, None)) is None:
                    raise self._other_length("fewer")
                if self.handed == self._step == 1:
                    self._see_numbers(sys._getframe().f_back)
                self._prepare(self._step, is_last=self.handed == length)
                yield self.place(read[1][0].batch)
            if next(batches, None) is not None:
                raise self._other_length("more")
        finally:
            batches.close()

    def _see_numbers(self, frame: FrameType | None) -> None:
        """Warn about `enumerate(batches)`, which counts from 0 again after a fault in the middle of an epoch."""
        numbered = any(type(each) is enumerate for each in gc.get_referrers(self._iterator()))
        if numbered and not any("first" in each.f_code.co_names for each in script_frames(frame)):
            self._data.warn(
                "hyperpod_ext: enumerate(batches) of run.epochs begins at 0 again after a fault, in the middle of an "
                "epoch. Write enumerate(batches, batches.first)\n"
            )

    def _other_length(self, how: str) -> JobFailedError:
        return JobFailedError(
            f"epoch {self.epoch} of the training data has {how} batches than the loader's length, "
            f"{self._data.steps_per_epoch}",
            hint="Give the batch sampler an exact __len__, because steps are counted with it.",
        )


def epochs_of(
    data: EpochData,
    epochs: int,
    made: int,
    steps: Callable[[int], Iterator[int]],
    prepare: PrepareStep,
) -> Iterator[tuple[int, Batches]]:
    """Yield the number and the remaining batches of each unfinished epoch.

    The last step of an epoch is committed only when all ranks have done the script's work after the epoch.

    Args:
        data: the loader.
        epochs: number of epochs of the whole job.
        made: number of steps committed so far.
        steps: the method `run.steps`.
        prepare: called before the script gets a batch.

    Raises:
        JobFailedError: an epoch was left before its last batch.
    """
    length = data.steps_per_epoch
    loop = steps(epochs * length)
    for epoch in range(made // length, epochs):
        batches = Batches(epoch, next(loop), data, loop, prepare)
        yield epoch, batches
        if batches.handed < length:
            raise JobFailedError(
                f"epoch {epoch} of run.epochs was left after {batches.handed} of its {length} batches",
                hint="Train on all batches of an epoch; to end the training early, leave both loops on every rank.",
            )
        dist.barrier()
    next(loop, None)


def _settings(sampler: Any) -> dict[str, Any]:
    """Return all numeric attributes of the samplers by name, except those whose name contains `epoch`."""
    return {
        f"{type(each).__name__}.{name}": value
        for each in chain_of(sampler)
        for name, value in own_values(each)
        if is_number(value) and "epoch" not in name
    }


def _copied(sampler: Any, dataset: Any) -> Any:
    """Return a deep copy of a sampler that shares the datasets with the original.

    Raises:
        JobFailedError: a part of the sampler cannot be copied.
    """
    sources = [dataset, *(getattr(each, "data_source", None) for each in chain_of(sampler))]
    memo = {id(each): each for each in sources}

    def parts(name: str, value: Any) -> Iterable[Named]:
        return () if id(value) in memo or isinstance(value, Dataset) else anything(name, value)

    for _, each in list(reachable([("sampler", sampler)], parts)):
        if isinstance(each, Dataset):
            memo[id(each)] = each
        elif isinstance(each, torch.Generator):  # older torch cannot deepcopy a torch.Generator
            memo[id(each)] = torch.Generator(each.device)
            memo[id(each)].set_state(each.get_state())
    try:
        return copy.deepcopy(sampler, memo)
    except Exception as error:
        raise JobFailedError(
            f"the training data's {type(sampler).__name__} cannot be copied: {type(error).__name__}: {error}",
            hint="Hold in samplers only numbers, lists, tensors, generators and datasets.",
        ) from error
