"""The loader: who reads does not matter, samples that cannot be read are told, and a run goes on where it was."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from waiting import until

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime import Run, resilient
from hyperpod_ext.runtime.data import ElasticDataLoader, Mixture, Stream
from hyperpod_ext.runtime.training.loop import _failure


class Noisy:
    """Samples with noise of all three generators, as augmentation makes it; some cannot be read."""

    fingerprint = "noisy"

    def __init__(self, n: int = 103, bad: tuple[int, ...] = (), error: type[Exception] = ValueError) -> None:
        self.n, self.bad, self.error = n, bad, error

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> list[float]:
        if index in self.bad:
            raise self.error("cannot be decoded")
        return [index, torch.rand(()).item(), random.random(), float(np.random.rand())]


def loader_of(source: Any, **options: Any) -> ElasticDataLoader:
    defaults = {"global_batch_size": 12, "micro_batch_size": 2, "rank": 0, "world_size": 1, "collate": list}
    return ElasticDataLoader(source, **(defaults | options))


def drain(loader: ElasticDataLoader) -> None:
    """Make every step of an epoch."""
    for step in loader.steps(1):
        loader.ack(step)


def read(source: Any, world_size: int, epochs: int = 2, **options: Any) -> dict[tuple[int, int], Any]:
    """(step, slot) -> micro-batch, over all ranks."""
    found: dict[tuple[int, int], Any] = {}
    loaders = [loader_of(source, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    for steps in zip(*[loader.steps(epochs) for loader in loaders], strict=True):
        for loader, step in zip(loaders, steps, strict=True):
            for slot, batch in zip(step.slots, step.micro_batches, strict=True):
                if slot.index >= 0:
                    found[step.number, slot.index] = batch
            loader.ack(step)
        assert sum(weight for step in steps for weight in step.weights) == pytest.approx(1)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"world_size": 4},
        {"world_size": 3, "workers": 2},
        {"world_size": 1, "workers": 1, "prefetch": 5},
    ],
)
def test_who_reads_does_not_matter_not_even_for_random_numbers(options: dict[str, Any]) -> None:
    alone = read(Noisy(), 1)
    assert len(alone) == 2 * 52
    assert read(Noisy(), **options) == alone


def test_threads_read_the_same_samples() -> None:
    ids = {place: [sample[0] for sample in batch] for place, batch in read(Noisy(), 1).items()}
    threads = read(Noisy(), 3, workers=2, worker_kind="thread", prefetch=3)
    assert {place: [sample[0] for sample in batch] for place, batch in threads.items()} == ids


@pytest.mark.parametrize("reader", [{}, {"workers": 2}])
def test_reading_leaves_the_generators_of_training_alone(reader: dict[str, Any]) -> None:
    def drawn() -> list[float]:
        return [*torch.rand(3).tolist(), random.random(), float(np.random.rand())]

    def seed() -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    seed()
    undisturbed = drawn()
    seed()
    loader = loader_of(Noisy(), **reader)
    step = next(loader.steps())
    assert drawn() == undisturbed
    loader.ack(step)


@pytest.mark.parametrize("error", [ValueError, StopIteration, IndexError])
@pytest.mark.parametrize("reader", [{}, {"workers": 2}, {"workers": 2, "worker_kind": "thread"}])
def test_a_sample_that_cannot_be_read_is_named(error: type[Exception], reader: dict[str, Any]) -> None:
    """StopIteration and IndexError would end a for loop as if all had been read."""
    loader = loader_of(Noisy(bad=(50,), error=error), **reader)
    with pytest.raises(JobFailedError) as failed:
        drain(loader)
    made = loader.state_dict()["step"]
    told = f"step {made + 1}, micro-batch 0, rank 0: sample 50 cannot be read: {error.__name__}: cannot be decoded"
    assert str(failed.value).startswith(told)
    assert made == 3


@pytest.mark.parametrize("reader", [{}, {"workers": 2}, {"workers": 2, "worker_kind": "thread"}])
def test_samples_that_cannot_be_read_are_left_out_and_recorded(
    reader: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    loader = loader_of(Noisy(bad=(50, 7)), on_error="skip", **reader)
    ids: list[float] = []
    missing = 0.0
    for step in loader.steps(1):
        ids += [sample[0] for batch in step.micro_batches for sample in batch]
        missing += (1 - sum(step.weights)) * step.samples
        loader.ack(step)
    assert sorted(ids) == [one for one in range(103) if one not in (7, 50)]
    assert sorted(lost.id for lost in loader.skipped) == [7, 50]
    assert missing == pytest.approx(2)
    assert "sample 50 left out: ValueError: cannot be decoded" in capfd.readouterr().err


def test_a_micro_batch_of_which_nothing_can_be_read_is_an_error() -> None:
    with pytest.raises(JobFailedError, match="no other sample of its micro-batch could be read either"):
        next(loader_of(Noisy(bad=tuple(range(103))), on_error="skip").steps())


def test_too_many_samples_left_out_are_an_error() -> None:
    loader = loader_of(Noisy(bad=tuple(range(0, 103, 7))), on_error="skip", most_skipped=5, micro_batch_size=12)
    with pytest.raises(JobFailedError, match="samples could not be read"):
        drain(loader)


def test_a_worker_that_is_killed_is_told_and_its_step_made_again() -> None:
    loader = loader_of(Deadly(), workers=1, prefetch=1)
    with pytest.raises(RuntimeError, match=r"reading step \d+: DataLoader worker \(pid.*/dev/shm") as caught:
        drain(loader)
    assert not _failure(caught.value, 5).final, "a job recovers from it"
    again = loader_of(Deadly())
    again.load_state_dict(loader.state_dict())
    assert next(again.steps()).number == loader.state_dict()["step"] + 1


class Deadly(Noisy):
    """Ends the worker process that reads sample 50."""

    def __getitem__(self, index: int) -> list[float]:
        if index == 50 and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return [index]


PARENT = """
import os, signal, sys
from hyperpod_ext.runtime.data import ElasticDataLoader
from hyperpod_ext.processes import descendants
loader = ElasticDataLoader(range(1000), global_batch_size=4, micro_batch_size=4, workers=2, rank=0, world_size=1)
steps = loader.steps()
next(steps)
print(*descendants(os.getpid()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_the_process_that_they_read_for(tmp_path: Path) -> None:
    """They hold its sockets open: another rank would wait for a dead one."""
    told = tmp_path / "workers"
    with told.open("w") as file:  # not a pipe: they would hold that open, too, and be waited for
        done = subprocess.run([sys.executable, "-c", PARENT], stdout=file, check=False)
    assert done.returncode == -signal.SIGKILL
    workers = [int(pid) for pid in told.read_text().split()]
    assert len(workers) == 2
    until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in workers))


def test_a_step_that_was_not_acknowledged_is_an_error_at_the_next() -> None:
    steps = loader_of(Noisy()).steps()
    next(steps)
    with pytest.raises(JobFailedError, match="step 1 was not acknowledged"):
        next(steps)


@pytest.mark.parametrize("reader", [{}, {"workers": 2, "worker_kind": "thread", "prefetch": 4}, {"workers": 1}])
def test_changes_hold_from_the_next_step_whatever_was_read_ahead(reader: dict[str, Any]) -> None:
    loader = loader_of(range(100), **reader)
    steps = loader.steps(1)
    ids: list[int] = []
    for change in (lambda: loader.set_world(0, 1), lambda: loader.set_batch(20, 5), lambda: loader.set_batch(9, 3)):
        step = next(steps)
        ids += [one for batch in step.micro_batches for one in batch]
        loader.ack(step)
        change()
    for step in steps:
        assert step.samples == 9 or len(ids) + step.samples == 100
        ids += [one for batch in step.micro_batches for one in batch]
        loader.ack(step)
    assert sorted(ids) == [*range(100)]


@pytest.mark.parametrize("reader", [{}, {"workers": 2, "worker_kind": "thread", "prefetch": 4}])
def test_a_world_that_changes_between_steps_is_noticed(reader: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A job resized in place: the loop goes on, and what was read ahead was read for the old world."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = loader_of(range(60), rank=None, world_size=None, **reader)
    steps = loader.steps(1)
    alone = loader_of(range(60))
    for number in range(5):
        if number == 2:
            monkeypatch.setenv("WORLD_SIZE", "1")
        step = next(steps)
        ids = [one for batch, _ in step for one in batch]
        wanted = [one for slot in alone.sampler.step() for one in slot.ids]
        assert ids == (wanted if number >= 2 else wanted[:6])
        loader.ack(step)
        alone.sampler.ack()


def test_a_change_between_a_step_and_its_ack_is_refused() -> None:
    loader = loader_of(range(100))
    step = next(loader.steps())
    loader.set_batch(20, 5)
    with pytest.raises(JobFailedError, match="step 1 was planned before the sampler was changed"):
        loader.ack(step)


def test_a_mixture_has_no_end() -> None:
    with pytest.raises(JobFailedError, match="a mixture has no end"):
        next(loader_of(Mixture([range(5), range(6)], [1, 1])).steps(epochs=1))


# --- streams ------------------------------------------------------------------------------------------


def numbers(n: int, opened: list[int]) -> Stream:
    def open_at(start: int) -> Iterator[int]:
        opened.append(start)
        return iter(range(start, n))

    return Stream(open_at, fingerprint=f"numbers/{n}")


@pytest.mark.parametrize("n", [1, 11, 12, 24, 103])
def test_a_stream_of_unknown_length_is_read_once_an_epoch_through_resizes(n: int) -> None:
    state: dict[str, Any] | None = None
    ids: list[int] = []
    opened: list[int] = []
    world = 3
    while state is None or len(ids) < 2 * n:
        loaders = [loader_of(numbers(n, opened), rank=rank, world_size=world, shuffle=False) for rank in range(world)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        for _, steps in zip(range(3), zip(*[loader.steps() for loader in loaders], strict=True), strict=False):
            for loader, step in zip(loaders, steps, strict=True):
                ids += [one for batch, weight in step if weight for one in batch]
                loader.ack(step)
        states = [loader.state_dict() for loader in loaders]
        assert all(one == states[0] for one in states)
        state, world = states[0], world % 4 + 1
    assert len(ids) >= 2 * n
    assert ids[:n] == ids[n : 2 * n] == [*range(n)]


def test_a_stream_that_fails_is_named_with_its_place() -> None:
    def open_at(start: int) -> Iterator[int]:
        yield from range(start, 20)
        raise OSError("connection lost")

    loader = loader_of(Stream(open_at, fingerprint="x"), shuffle=False)
    with pytest.raises(JobFailedError, match=r"step 2, epoch 0, sample 12 .*OSError: connection lost"):
        drain(loader)


@pytest.mark.parametrize(("n", "drop_last"), [(24, False), (24, True), (25, True), (25, False)])
def test_a_stream_is_read_once_by_each_pass_over_the_loader(n: int, drop_last: bool) -> None:
    loader = loader_of(numbers(n, []), shuffle=False, drop_last=drop_last)
    for _ in range(3):
        ids: list[int] = []
        for step in loader:
            ids += [one for batch, weight in step if weight for one in batch]
            loader.ack(step)
        assert ids == [*range(24 if drop_last else n)]


def test_a_stream_without_samples_is_an_error() -> None:
    with pytest.raises(JobFailedError, match="the stream has only 0 samples, too few for one step"):
        next(loader_of(numbers(0, []), shuffle=False).steps())


# --- under @resilient ---------------------------------------------------------------------------------


def test_a_resilient_run_takes_the_loader_as_part_of_its_state() -> None:
    seen: list[int] = []

    @resilient
    def train(run: Run) -> dict[str, Any]:
        model = run.keep(lambda: nn.Linear(1, 1))
        loader = ElasticDataLoader(range(50), global_batch_size=8, micro_batch_size=4, collate=list)
        run.restore(model=model, data=loader)
        for number, step in zip(run.steps(5), loader.steps(), strict=False):
            assert step.number == number
            seen.extend(one for batch, _ in step for one in batch)
            loader.ack(step)
        return loader.state_dict()

    assert train()["place"] == 40
    assert len(set(seen)) == 40
