"""A trainer's own loader: read from any step on, it gives the samples that it gives by itself; with torch alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.integrations.trainer_loader import TrainerLoader


class Noisy(Dataset[torch.Tensor]):
    """A sample is its number, and a random one."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


class Groups(Sampler[int]):
    """Each sample twice in a row, in an order from a generator that goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Any:
        for index in torch.randperm(11, generator=self.generator).tolist():
            yield from (index, index)


def loader(sampler: Any = None, *, batches: Any = None, workers: int = 0, made: Any = (), **options: Any) -> Any:
    """Batches of 4, two of which make a step; `made`: what was saved of another one."""
    by = {"batch_sampler": batches} if batches is not None else {"sampler": sampler or Groups(), "batch_size": 4}
    given = TrainerLoader(
        DataLoader(Noisy(), num_workers=workers, **by), seed=5, rank=options.pop("rank", 0), per_step=2, **options
    )
    if made:
        given.load_state_dict(made)
    return given


def read(given: TrainerLoader, epochs: range, states: list[dict[str, Any]] | None = None) -> list[list[list[float]]]:
    """Batches of these epochs, as a trainer reads them; the state after each step."""
    found = []
    for epoch in epochs:
        given.set_epoch(epoch)
        for number, batch in enumerate(given):
            torch.rand(3)  # what a step draws
            found.append(batch.tolist())
            if number % 2 or len(batch) < 4:
                given.step_made()
                if states is not None:
                    states.append(given.state_dict())
        given.epoch_made()
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_any_step_is_read_again_as_it_was(workers: int) -> None:
    """Groups of a sampler's own stay whole; its generator, and what samples draw, are as in the pass before."""
    states: list[dict[str, Any]] = []
    torch.manual_seed(1)
    whole = read(loader(), range(3), states)
    assert all(batch[0][0] == batch[1][0] for batch in whole), "groups"
    assert len(whole) == 18, "the last batch of an epoch is smaller"
    for step in (0, 1, 2, 4, 7) if workers == 0 else (4,):
        torch.manual_seed(step)
        here = states[step]
        again = read(loader(made=here, workers=workers), range(here["epoch"], 3))
        assert again == whole[-len(again) :], step
        assert len(again) == 18 - 6 * here["epoch"] - min(2 * here["made"], 6)


def test_a_sampler_without_a_generator_draws_the_same_on_all_ranks_and_in_each_process() -> None:
    states: list[dict[str, Any]] = []
    whole = read(loader(RandomSampler(Noisy())), range(2), states)
    torch.manual_seed(77)
    of_other = read(loader(RandomSampler(Noisy()), rank=1), range(2))
    numbers = [[sample[0] for sample in batch] for batch in whole]
    assert [[sample[0] for sample in batch] for batch in of_other] == numbers
    assert of_other != whole, "samples draw other numbers on another rank"
    again = read(loader(RandomSampler(Noisy()), made=states[3]), range(1, 2))
    assert again == whole[-len(again) :]
    assert numbers[:6] != numbers[6:], "another epoch, another order"


def test_other_data_or_another_order_is_refused_where_the_run_goes_on() -> None:
    saved = loader().state_dict()
    with pytest.raises(JobFailedError, match="the training data's order is 'BatchSampler/RandomSampler' here"):
        loader(RandomSampler(Noisy()), made=saved)
    with pytest.raises(JobFailedError, match="the training data's steps_per_epoch is 2 here and 3 in the saved run"):
        loader(batches=BatchSampler(Groups(), 6, False), made=saved)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


class OwnWay(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([1, 2], "a list over NoneType: it is not a torch DataLoader"),
        (DataLoader(Stream()), "a DataLoader over Stream: the dataset has no access to a sample by its number"),
        (DataLoader(Noisy(), batch_size=None), "a DataLoader over Noisy: it has no batch sampler"),
        (OwnWay(Noisy()), "OwnWay reads batches with code of its own"),
    ],
)
def test_what_cannot_be_read_by_position_is_refused_by_name(given: Any, why: str) -> None:
    with pytest.raises(JobFailedError, match=why):
        TrainerLoader(given, seed=0, rank=0, per_step=1)
