"""When live state may be offered to others, and when not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.checkpoint.checkpointer import Snapshot
from hyperpod_ext.runtime.restart.randomness import seed_of, seed_step
from hyperpod_ext.runtime.restart.state import TrainingState, Whole

WHOLE = Whole(3, "g1-s3", "")


class Trained:
    """A model, its optimizer and its schedule, with state committed at step 3."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.backward()
        self.optimizer.step()
        self.state = TrainingState({"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule})
        self.state.commit(self.state.take(), WHOLE)

    def backward(self) -> None:
        self.model(torch.randn(8, 4)).sum().backward()


@pytest.fixture
def trained() -> Trained:
    return Trained()


def test_untouched_state_is_whole(trained):
    assert trained.state.whole() == WHOLE


def test_gradients_alone_do_not_touch_it(trained):
    trained.model.eval()
    trained.backward()
    assert trained.state.whole() == WHOLE


@pytest.mark.parametrize("touch", ["a forward with statistics", "an optimizer step", "a schedule step", "a parameter"])
def test_state_is_no_longer_whole_after(trained, touch):
    match touch:
        case "a forward with statistics":
            trained.model(torch.randn(8, 4))
        case "an optimizer step":
            trained.optimizer.step()
        case "a schedule step":
            trained.schedule.step()
        case "a parameter":
            with torch.no_grad():
                next(trained.model.parameters()).add_(1)
    assert trained.state.whole() is None


def test_own_digests_differ_only_by_what_is_each_ranks_own(trained):
    before = trained.state.take().own_digest()
    with torch.no_grad():
        next(trained.model.parameters()).add_(1)
    assert trained.state.take().own_digest() == before
    trained.model(torch.randn(8, 4))
    assert trained.state.take().own_digest() != before


def snapshot_of(state: TrainingState) -> Snapshot:
    taken = state.take()
    return Snapshot(3, taken.skeleton, [tensor.detach().clone() for tensor in taken.tensors], {})


def test_state_moves_to_another_process_bit_for_bit(trained):
    other = Trained()
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.fill_(0.5)
    other.schedule.step()
    assert other.state.digest() != trained.state.digest()
    other.state.load(snapshot_of(trained.state))
    assert other.state.digest() == trained.state.digest()


def test_a_model_built_differently_is_named():
    narrow, wide = nn.Linear(2, 2), nn.Linear(3, 2)
    with pytest.raises(JobFailedError, match="model of this rank does not take the job's state: Error"):
        TrainingState({"model": wide}).load(snapshot_of(TrainingState({"model": narrow})))


def test_other_names_are_named():
    model = nn.Linear(2, 2)
    with pytest.raises(JobFailedError, match=r"holds \['model'\], this rank registered \['net'\]"):
        TrainingState({"net": model}).load(snapshot_of(TrainingState({"model": model})))


def test_an_object_without_state_is_refused():
    with pytest.raises(JobFailedError, match=r"restore\(lr=\.\.\.\): float has no state_dict"):
        TrainingState({"lr": 0.1})  # type: ignore[dict-item]


def test_random_numbers_follow_from_seed_step_and_rank():
    def draw(seed: int, step: int, rank: int) -> list[float]:
        seed_step(seed, step, rank)
        return torch.rand(3).tolist()

    assert draw(0, 5, 1) == draw(0, 5, 1)
    assert len({tuple(draw(seed, step, rank)) for seed in (0, 1) for step in (5, 6) for rank in (0, 1)}) == 8
    assert seed_of(0, 1, 23) != seed_of(0, 12, 3)
