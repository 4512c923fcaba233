"""`run.epochs` in one process: how steps are counted, what is read again, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime import Run, resilient
from hyperpod_ext.runtime.training.epochs import EpochData


class Samples(Dataset[torch.Tensor]):
    """A sample is its number, and a random one."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


class Own(Sampler[int]):
    """An order from a generator of its own."""

    def __init__(self) -> None:
        self.random, self.difficulty = np.random.default_rng(5), 1

    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.permutation(22).tolist())


def seeded(data: Samples) -> RandomSampler:
    return RandomSampler(data, generator=torch.Generator().manual_seed(3))


def distributed(data: Samples, rank: int = 0) -> DistributedSampler[torch.Tensor]:
    return DistributedSampler(data, num_replicas=2, rank=rank)


MAKE: dict[str, Callable[[Samples], Sampler[int]]] = {
    "random": RandomSampler,
    "seeded": seeded,
    "distributed": distributed,
    "own": lambda _: Own(),
}


def data_of(sampler: Any, data: Samples, workers: int = 0, rank: int = 0) -> EpochData:
    return EpochData(DataLoader(data, 4, sampler=sampler, num_workers=workers), seed=7, rank=rank, warn=lambda _: None)


def batches(data: EpochData, epoch: int, made: int = 0) -> list[Any]:
    return [fetched[0].batch.tolist() for _, fetched in data.read(epoch, made)]


@pytest.mark.parametrize("kind", MAKE)
def test_any_step_is_read_again_whatever_was_read_before(kind: str) -> None:
    """By processes of the loader, too; also where the sampler outlives the first call. Earlier samples are not read."""
    samples = Samples()
    sampler = MAKE[kind](samples)
    given = data_of(sampler, samples)
    epochs = [batches(given, epoch) for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    for number, (at, made, workers) in enumerate([(2, 1, 0), (1, 2, 2), (0, 0, 0)]):
        torch.manual_seed(number)
        np.random.seed(number)
        samples.read.clear()
        assert batches(data_of(sampler, samples, workers), at, made) == epochs[at][made:], (at, made)
        wanted = [int(sample[0]) for batch in epochs[at][made:] for sample in batch]
        assert samples.read == ([] if workers else wanted)


def test_each_rank_has_a_random_order_of_its_own_unless_its_sampler_shares_the_data() -> None:
    samples = Samples()
    first, second = (batches(data_of(RandomSampler(samples), samples, rank=rank), 0) for rank in range(2))
    numbers = [[sample[0] for batch in one for sample in batch] for one in (first, second)]
    assert sorted(numbers[0]) == sorted(numbers[1]) == list(range(22))
    assert numbers[0] != numbers[1]
    shared = [batches(data_of(distributed(samples, rank), samples, rank=rank), 1) for rank in range(2)]
    assert sorted(sample[0] for one in shared for batch in one for sample in batch) == list(range(22))


def alone(body: Callable[[Run], Any]) -> Any:
    return resilient(body)()


def model_of(run: Run) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = run.keep(lambda: nn.Linear(2, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train_on(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def test_each_batch_is_a_step_and_the_work_after_an_epoch_belongs_to_its_last_one(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def train(run: Run) -> list[Any]:
        model, optimizer = model_of(run)
        loader = DataLoader(Samples(), 4, shuffle=True)
        seen: list[Any] = []
        for epoch, batches in run.epochs(loader, 2, **locals()):
            assert (len(batches), batches.first) == (6, 0)
            for x in batches:
                train_on(model, optimizer, x)
            seen.append((epoch, run.step))
        return [*seen, run.step]

    assert alone(train) == [(0, 5), (1, 11), 12]
    assert "without a generator" not in capfd.readouterr().err


def test_random_numbers_of_a_step_do_not_depend_on_the_work_before_its_epoch() -> None:
    """After a fault the work before an epoch is done in the middle of it."""

    def train(run: Run, draws: int) -> list[Any]:
        model, _ = model_of(run)
        drawn: list[Any] = []
        for _, batches in run.epochs(DataLoader(Samples(), 4), 2, model=model):
            torch.rand(draws)
            drawn += [(torch.rand(2).tolist(), x.tolist()) for x in batches]
        return drawn

    assert alone(lambda run: train(run, 0)) == alone(lambda run: train(run, 3))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class Estimated(BatchSampler):
    """Batches of an estimated number."""

    def __init__(self, length: int) -> None:
        super().__init__(range(8), 2, drop_last=False)
        self.length = length

    def __len__(self) -> int:
        return self.length


def left_early(run: Run) -> None:
    model, _ = model_of(run)
    for _, batches in run.epochs(DataLoader(Samples(), 4), 2, **locals()):
        for _ in batches:
            break


def iterated_twice(run: Run) -> None:
    model, _ = model_of(run)
    for _, batches in run.epochs(DataLoader(Samples(), 4), 2, **locals()):
        for _ in range(2):
            list(batches)


def changed_sampler(run: Run) -> None:
    model, _ = model_of(run)
    sampler = Own()
    for _, batches in run.epochs(DataLoader(Samples(), 4, sampler=sampler), 2, **locals()):
        list(batches)
        sampler.difficulty += 1


def uncopied_sampler(run: Run) -> None:
    model, _ = model_of(run)
    sampler = Own()
    sampler.numbers = (number for number in range(22))  # type: ignore[attr-defined]  # as a script may do
    list(run.epochs(DataLoader(Samples(), 4, sampler=sampler), 2, **locals()))


def restored_before(run: Run) -> None:
    model, _ = model_of(run)
    run.restore(model=model)
    list(run.epochs(DataLoader(Samples(), 4), 2, **locals()))


def of_loader(loader: Any) -> Callable[[Run], None]:
    def train(run: Run) -> None:
        for _, batches in run.epochs(loader, 2, model=run.keep(lambda: nn.Linear(2, 1))):
            list(batches)

    return train


@pytest.mark.parametrize(
    ("train", "why"),
    [
        (left_early, "epoch 0 of run.epochs was left after 1 of its 6 batches"),
        (iterated_twice, "the batches of epoch 0 were iterated twice"),
        (changed_sampler, "Own.difficulty of the training data's sampler was 1 when .* is 2 before epoch 1"),
        (uncopied_sampler, "the training data's BatchSampler cannot be copied: TypeError"),
        (restored_before, r"epochs\(\) was called after restore\(\)"),
        (
            of_loader(DataLoader(Stream())),
            "a DataLoader over Stream: the dataset has no access to a sample by its number",
        ),
        (of_loader([1, 2]), "a list over NoneType: it is not a torch DataLoader"),
        (
            of_loader(DataLoader(Samples(), batch_sampler=Estimated(5))),
            "epoch 0 .* has fewer batches than .* length, 5",
        ),
        (of_loader(DataLoader(Samples(), batch_sampler=Estimated(3))), "epoch 0 .* has more batches than .* length, 3"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_epochs_that_cannot_be_continued_exactly_are_refused(train: Callable[[Run], None], why: str) -> None:
    with pytest.raises(JobFailedError, match=why):
        alone(train)


def test_the_last_step_before_both_loops_are_left_is_not_committed_and_named(capfd: pytest.CaptureFixture[str]) -> None:
    def train(run: Run) -> int:
        model, optimizer = model_of(run)
        for _, batches in run.epochs(DataLoader(Samples(), 4), 2, **locals()):
            for x in batches:
                train_on(model, optimizer, x)
            break
        return run.step

    assert alone(train) == 5
    assert "train() returned within step 6, which is not committed" in capfd.readouterr().err


@pytest.mark.parametrize("knows", [True, False])
def test_numbers_of_batches_that_would_begin_again_after_a_fault_are_warned_of(
    capfd: pytest.CaptureFixture[str], knows: bool
) -> None:
    def numbered(batches: Any, *first: int) -> None:
        for _ in enumerate(batches, *first):
            pass

    def train_from_first(run: Run) -> None:
        for _, batches in run.epochs(DataLoader(Samples(), 4), 1, model=nn.Linear(1, 1)):
            numbered(batches, batches.first)

    def train(run: Run) -> None:
        for _, batches in run.epochs(DataLoader(Samples(), 4), 1, model=nn.Linear(1, 1)):
            numbered(batches)

    alone(train_from_first if knows else train)
    assert ("Write enumerate(batches, batches.first)" in capfd.readouterr().err) is not knows
