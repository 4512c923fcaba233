"""Ranks that would read other samples than one another, or register other objects, are named before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.control_plane.stop_at_step import StopAtStep
from hyperpod_ext.runtime.data import ElasticBatchSampler
from hyperpod_ext.runtime.snapshot.select import Decision, start_fresh
from hyperpod_ext.runtime.state.same_data import DataPositions, check_same_data
from hyperpod_ext.runtime.state.training_state import TrainingState
from hyperpod_ext.runtime.training.restore import JobLink


def state_of(rank: int, fingerprint: str = "numbers", seed: int = 0) -> TrainingState:
    """What a rank gives to `restore()`."""
    model = nn.Linear(1, 1)
    data = ElasticBatchSampler(
        range(101),
        global_batch_size=12,
        micro_batch_size=2,
        rank=rank,
        world_size=4,
        fingerprint=fingerprint,
        seed=seed,
    )
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return TrainingState({"model": model, "optimizer": optimizer, "schedule": schedule, "data": data})


def told_by(rank: int, fingerprint: str = "numbers", seed: int = 0) -> DataPositions:
    """What it says of these."""
    return state_of(rank, fingerprint, seed).data_positions()


def check(*told: DataPositions) -> None:
    """Every rank has its turn, rank 0 last."""
    keys = HashStore()
    for rank in reversed(range(len(told))):
        check_same_data(keys, rank, len(told), told[rank])


def test_the_same_data_on_every_rank_is_fine():
    data = {"fingerprint": "numbers", "order": "1/global", "seed": 0}
    assert told_by(0) == {"model": {}, "optimizer": {}, "schedule": {}, "data": data}
    check(*(told_by(rank) for rank in range(4)))
    check({}, {})
    check(told_by(0))


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (
            [told_by(0), told_by(1), told_by(2, "others"), told_by(3, "others")],
            "restore(data=...): the fingerprint of the data differs between ranks: "
            "'numbers' on ranks 0, 1, 'others' on ranks 2, 3",
        ),
        ([told_by(0), told_by(1, seed=7)], "the seed of the data differs between ranks: 0 on rank 0, 7 on rank 1"),
        ([{}, {"data": told_by(1)["data"]}, {}], "data is registered on rank 1, and not on ranks 0, 2"),
        ([{"model": {}}, {"model": {}, "average": {}}], "average is registered on rank 1, and not on rank 0"),
        ([told_by(0)] + [told_by(1, "others")] * 20, "on ranks 1, 2, 3, 4, 5, 6, 7, 8 and 12 more"),
    ],
)
def test_other_data_is_an_error_that_names_the_ranks(told: list[DataPositions], words: str):
    with pytest.raises(JobFailedError) as error:
        check(*told)
    assert words in str(error.value)


class Agreed:
    """A control plane where all others have restored already."""

    stop_at_step = StopAtStep()

    def restored(self, attempt: int, error: str) -> tuple[int | None, Decision | None]:
        assert not error
        return 0, None

    def event(self, event: str, **fields: Any) -> None:
        return


class NothingKept:
    """The checkpointer of a job that begins."""

    def close_peers(self) -> None:
        return


@pytest.mark.parametrize("other", ["numbers", "others"])
def test_a_fresh_start_compares_before_anybody_trains(other: str):
    keys, restored = HashStore(), []
    for rank, state in ((1, state_of(1, other)), (0, state_of(0))):
        link = JobLink(Agreed(), rank, NothingKept())  # type: ignore[arg-type]
        link.enter(start_fresh({0: 0, 1: 0}), keys)  # type: ignore[arg-type]
        if rank == 0 and other == "others":
            with pytest.raises(JobFailedError, match="'numbers' on rank 0, 'others' on rank 1"):
                link.restore(state, dict)
        else:
            restored.append(link.restore(state, dict).step)
    assert restored == ([0] if other == "others" else [0, 0])
