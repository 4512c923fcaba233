"""Reads one micro-batch of collated samples. Random numbers depend only on seed, step and micro-batch number (slot)."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

OnError = Literal["fail", "skip"]
Collate = Callable[[list[Any]], Any]
Returned = TypeVar("Returned")


@dataclass(frozen=True, slots=True)
class Task:
    """The sample numbers of one micro-batch to read."""

    step: int
    slot: int
    ids: list[int]
    counts: bool = True
    """Whether to report skipped samples. False for a ghost, a copy of another rank's micro-batch with weight 0:
    the other rank reports its skipped samples."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A sample that was left out because it could not be read."""

    id: int
    step: int
    slot: int
    error: str


@dataclass(frozen=True, slots=True)
class Fetched:
    """Result of reading one task. A failure is a field and not an exception, so that worker processes can send
    failures."""

    batch: Any = None
    kept: int = 0
    """Number of samples in the micro-batch."""
    skipped: tuple[Skipped, ...] = ()
    failure: str = ""
    """Why the micro-batch could not be read; empty if it was read."""


class Fetch:
    """Reads the micro-batch of each task. A `Fetch` object is sent to each worker process."""

    def __init__(self, source: Any, collate: Collate | None, seed: int, on_error: OnError) -> None:
        self._source, self._seed, self._on_error = source, seed, on_error
        self._collate = collate

    def __call__(self, task: Task) -> Fetched:
        """Read `task` without seeding or restoring the random generators."""
        samples, skipped = self._samples(task)
        if skipped and (self._on_error == "fail" or not samples):
            why = "; no other sample of its micro-batch could be read either" if self._on_error == "skip" else ""
            return Fetched(failure=f"sample {skipped[0].id} cannot be read: {skipped[0].error}{why}")
        try:
            batch = (self._collate or default_collate())(samples)
        except Exception as error:  # the user's collate function may raise any error
            return Fetched(failure=f"collate: {_text(error)}")
        return Fetched(batch, len(samples), tuple(skipped) if task.counts else ())

    def seeded(self, task: Task) -> Fetched:
        """Read `task`, after seeding the random generators of Python, numpy and torch for the task. Does not restore
        the generators."""
        _seed_all(f"{self._seed}/{task.step}/{task.slot}")
        return self(task)

    def aside(self, tasks: Sequence[Task]) -> list[Fetched]:
        """Read the tasks of one step in the training process, as `seeded` does. Restores the random generators after
        reading."""
        # restore generators only once per step, because restoring numpy's takes longer than reading a few samples
        with _generators_put_back():
            return [self.seeded(task) for task in tasks]

    def _samples(self, task: Task) -> tuple[list[Any], list[Skipped]]:
        at_once = getattr(self._source, "__getitems__", None)
        if callable(at_once):
            try:
                samples = list(at_once(task.ids))
                if len(samples) == len(task.ids):
                    return samples, []
            except Exception:  # the loop below reads samples one by one, to find the bad sample
                pass
        samples, skipped = [], []
        for one in task.ids:
            try:
                samples.append(self._source[one])
            # also catches StopIteration, which would end the epoch as if all samples had been read
            except Exception as error:
                skipped.append(Skipped(one, task.step, task.slot, _text(error)))
                if self._on_error == "fail":
                    break
        return samples, skipped


def default_collate() -> Collate:
    """Return torch's default collate function. Without torch, return a function that makes a list of the samples."""
    try:
        from torch.utils.data import default_collate as of_torch
    except ImportError:
        return list
    return of_torch


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def seeded_aside(call: Callable[[], Returned], *key: int) -> Returned:
    """Return `call()`. Seeds the random generators of Python, numpy and torch from `key` before the call, and restores
    the generators after the call."""
    with _generators_put_back():
        _seed_all("/".join(map(str, key)))
        return call()


def _seed_all(key: str) -> None:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little")
    random.seed(value)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(value % (1 << 32))
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(value)  # torch.manual_seed would also seed and initialize the GPU


@contextmanager
def _generators_put_back() -> Iterator[None]:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    of_python = random.getstate()
    of_numpy = numpy.random.get_state() if numpy else None
    of_torch = torch.default_generator.get_state() if torch else None
    try:
        yield
    finally:
        random.setstate(of_python)
        if numpy:
            numpy.random.set_state(of_numpy)
        if torch:
            torch.default_generator.set_state(of_torch)
