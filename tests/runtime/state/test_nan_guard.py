"""Steps that are not finite: skipped so many times in a row, and no more. With torch, and one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from world_of_one import world_of_one

from hyperpod_ext.config.detection import NanPolicy
from hyperpod_ext.errors import NonFiniteError
from hyperpod_ext.runtime.state.nan_guard import NanGuard

NAN = float("nan")


class Training:
    """One weight, whose gradient is what a test says."""

    def __init__(self, **policy: Any) -> None:
        self.events: list[str] = []
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.guard = NanGuard(NanPolicy(**policy), 0, lambda event, **_: self.events.append(event))
        self.guard.attach({"optimizer": self.optimizer})
        self._step = 0

    def step(self, gradient: float, loss: float = 0.0) -> None:
        self._step += 1
        self.guard.begin_step(self._step)
        self.guard.see(torch.tensor(loss))
        self.weight.grad = torch.tensor([gradient])
        self.optimizer.step()
        self.guard.end_step()


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with world_of_one():
        yield


def test_a_skipped_step_changes_nothing():
    training = Training(action="skip", max_skips=3)
    training.step(1.0)
    training.step(NAN)
    training.step(1.0, loss=NAN)
    assert training.weight.item() == -1.0
    assert training.events == ["skipped", "skipped"]
    training.step(1.0)
    assert training.weight.item() == -2.0


def test_so_many_are_skipped_in_a_row_and_the_next_is_a_fault():
    training = Training(action="skip", max_skips=2)
    training.step(NAN)
    training.step(NAN)
    with pytest.raises(NonFiniteError, match="after 2 skipped steps in a row"):
        training.step(NAN)
    assert training.events == ["skipped"] * 2


def test_what_the_forward_pass_did_to_buffers_is_undone():
    module = torch.nn.BatchNorm1d(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    guard = NanGuard(NanPolicy(action="skip"), 0, lambda event, **_: None)
    guard.attach({"module": module, "optimizer": optimizer})
    guard.begin_step(1)
    module(torch.tensor([[1.0], [3.0]])).sum().backward()
    optimizer.step()
    guard.end_step()
    kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
    guard.begin_step(2)
    module(torch.tensor([[NAN], [3.0]])).sum().backward()
    optimizer.step()
    assert all(torch.equal(buffer, kept[name]) for name, buffer in module.named_buffers())


class Centred(torch.nn.Module):
    """Assigns a new tensor to its buffer in each pass, as DINO does; another buffer comes with the first pass."""

    center: torch.Tensor
    largest: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("center", torch.zeros(2))
        self.register_buffer("largest", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        self.center = self.center * 0.9 + y.detach().mean(0) * 0.1
        self.largest = y.detach().max()
        return y - self.center


def test_buffers_that_are_assigned_anew_are_undone():
    module = Centred()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    events: list[str] = []
    guard = NanGuard(NanPolicy(action="skip", max_skips=1), 0, lambda event, **_: events.append(event))
    guard.attach({"module": module, "optimizer": optimizer})

    def step(number: int, value: float) -> None:
        guard.begin_step(number)
        optimizer.zero_grad()
        module(torch.full((1, 2), value)).square().mean().backward()
        optimizer.step()
        guard.end_step()

    step(1, NAN)
    assert module.center.tolist() == [0.0, 0.0]
    assert module.largest is None
    step(2, 1.0)
    kept = module.center.clone()
    step(3, NAN)
    assert torch.equal(module.center, kept)
    step(4, 1.0)
    assert events == ["skipped", "skipped"]


@pytest.mark.parametrize("value", [1.0, NAN])
def test_sparse_gradients_are_looked_at(value: float):
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    events: list[str] = []
    guard = NanGuard(NanPolicy(action="skip"), 0, lambda event, **_: events.append(event))
    guard.attach({"embedding": embedding, "optimizer": optimizer})
    guard.begin_step(1)
    (embedding(torch.tensor([1, 2, 1])) * value).sum().backward()
    optimizer.step()
    assert events == ([] if value == 1.0 else ["skipped"])


@pytest.mark.parametrize("value", [500.0, float("inf"), NAN])
def test_half_gradients_whose_norm_is_no_half_are_finite(value: float):
    weight = torch.nn.Parameter(torch.zeros(512, 512, dtype=torch.float16))
    other = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight, other], lr=0.1)
    events: list[str] = []
    guard = NanGuard(NanPolicy(action="skip"), 0, lambda event, **_: events.append(event))
    guard.attach({"optimizer": optimizer})
    guard.begin_step(1)
    weight.grad, other.grad = torch.full_like(weight, 500.0), torch.ones_like(other)
    weight.grad[7, 7] = value
    optimizer.step()
    assert events == ([] if value == 500.0 else ["skipped"])


def test_a_step_that_was_made_starts_the_count_anew():
    training = Training(action="skip", max_skips=1)
    for _ in range(3):
        training.step(NAN)
        training.step(1.0)
    assert training.weight.item() == -3.0


def test_where_nothing_is_skipped_the_first_is_a_fault_and_changes_nothing():
    training = Training(action="raise")
    with pytest.raises(NonFiniteError, match=r"step 1: a gradient on rank 0 \(first on this rank: a parameter\)"):
        training.step(NAN)
    assert training.weight.item() == 0.0
