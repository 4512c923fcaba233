"""A step that is made again begins with the gradients that existed when the one before was committed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from world_of_one import world_of_one

from hyperpod_ext.runtime.snapshot.image import Layout, is_dtensor, views
from hyperpod_ext.runtime.snapshot.snapshot import Snapshot
from hyperpod_ext.runtime.state import gradients
from hyperpod_ext.runtime.state.training_state import ConsistentStep, TrainingState


class Branched(nn.Module):
    """One of its layers is used at some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = self.always(x)
        return self.seldom(x) if step % 3 == 1 else x


class Training:
    """A script's objects, and its step."""

    def __init__(self, wrap: Callable[[nn.Module], object] = lambda model: None) -> None:
        torch.manual_seed(0)
        self.model = Branched()
        wrap(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = TrainingState({"model": self.model, "optimizer": self.optimizer})

    def step(self, step: int, *, last: bool, to_none: bool) -> None:
        if not last:
            self.optimizer.zero_grad(set_to_none=to_none)
        self.model(torch.full((2, 4), float(step)), step).square().sum().backward()
        self.optimizer.step()
        if last:
            self.optimizer.zero_grad(set_to_none=to_none)


def existing(state: TrainingState) -> gradients.Ranges:
    return state.existing_and_changed(state.take())[0]


def snapshot_of(state: TrainingState) -> Snapshot:
    parts = state.take().parts
    layout = Layout(parts)
    image = bytearray(layout.plan.nbytes)
    for place, tensor in zip(views(layout.plan, image), layout.locals, strict=True):
        place.copy_(tensor)
    return Snapshot(0, layout.plan, list(parts.values), lambda: memoryview(image))


def shard(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.fixture(params=["plain", "FSDP2"])
def training(request):
    if request.param == "plain":
        yield Training
        return
    with world_of_one():
        yield lambda: Training(shard)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
def test_a_process_that_replaces_another_and_a_survivor_make_the_same_steps_as_without_the_fault(
    training, last, to_none
):
    undisturbed, survivor = training(), training()
    for step in (1, 2):
        undisturbed.step(step, last=last, to_none=to_none)
        survivor.step(step, last=last, to_none=to_none)
    existed, saved = existing(undisturbed.state), snapshot_of(undisturbed.state)
    new = training()
    new.state.load([saved])
    survivor.model(torch.ones(2, 4), 4).sum().backward()  # here the fault comes
    for each in (new, survivor):
        each.state.clear_gradients()
        each.state.give_gradients(existed)
        assert existing(each.state) == existed
    for step in (3, 4, 5, 6):  # the seldom layer is moved by momentum and decay, where its gradient is zero
        for each in (undisturbed, survivor, new):
            each.step(step, last=last, to_none=to_none)
    assert new.state.digest() == survivor.state.digest() == undisturbed.state.digest()


@pytest.mark.parametrize("dropped", [False, True])
def test_gradients_of_parameters_that_no_optimizer_has_go_on_adding_up(training, dropped):
    """As where one layer alone is trained, the norm of all gradients is clipped, and the optimizer drops its own."""

    def step(each: Training, number: int) -> None:
        (each.model if dropped else each.optimizer).zero_grad()
        each.model(torch.full((2, 4), float(number)), 1).square().sum().backward()
        nn.utils.clip_grad_norm_(each.model.parameters(), 0.1)
        each.optimizer.step()
        with torch.no_grad():  # an evaluation: it leaves FSDP2's parameters unsharded
            each.model(torch.ones(2, 4), 1)
        each.state.take(step_ended=True)

    def make() -> Training:
        each = training()
        each.optimizer = torch.optim.AdamW(each.model.seldom.parameters(), lr=0.1)
        each.state = TrainingState({"model": each.model, "optimizer": each.optimizer})
        return each

    undisturbed, survivor, new = make(), make(), make()
    for number in (1, 2):
        for each in (undisturbed, survivor):
            step(each, number)
    existed, saved = existing(undisturbed.state), snapshot_of(undisturbed.state)
    assert (len(saved.plan.shape[1]) == 2) == dropped, "they take memory only where they matter"
    survivor.model(torch.ones(2, 4), 1).sum().backward()  # here the fault comes
    new.state.load([saved])
    for each in (survivor, new):
        each.state.clear_gradients()
        each.state.give_gradients(existed)
    for number in (3, 4):
        for each in (undisturbed, survivor, new):
            step(each, number)
    assert new.state.digest() == survivor.state.digest() == undisturbed.state.digest()


def test_gradients_that_exist_are_told_in_ranges_of_parameters():
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(6)))
    for index in (0, 1, 4):
        model[index].weight.grad = torch.ones(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    assert gradients.existing(gradients.parameters([model, optimizer])) == [[0, 2], [4, 5]]


def test_a_sparse_gradient_is_sparse_after_a_fault_too():
    """SparseAdam takes no other, and DDP expects what it reduced before."""
    model = nn.ModuleList([nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2, bias=False)])
    model[1](model[0](torch.tensor([1, 3]))).sum().backward()
    existed = gradients.existing(gradients.parameters([model]))
    assert existed == [[0, 1, 1], [1, 2]]
    model.zero_grad()
    gradients.give_zeros([model], existed)
    assert gradients.existing(gradients.parameters([model])) == existed
    assert model[0].weight.grad.to_dense().count_nonzero() == 0
    torch.optim.SparseAdam(model[0].parameters()).step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_zeros_lie_as_autograd_would_lay_them(dtype):
    weight = nn.Parameter(torch.ones(4, 3, 5, 5, dtype=dtype).to(memory_format=torch.channels_last))
    other, frozen, empty = (
        nn.Parameter(torch.ones(7, dtype=dtype)),
        nn.Parameter(torch.ones(2), False),
        nn.Parameter(torch.ones(0)),
    )
    model = nn.ParameterList([weight, other, frozen, empty])
    gradients.give_zeros([model], [[0, 2], [3, 4]])
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()
    assert other.grad is not None
    other.grad += 1
    assert weight.grad.count_nonzero() == 0
    assert weight.grad.dtype == dtype
    assert frozen.grad is None
    assert empty.grad is not None


def test_zeros_for_shards_are_shards():
    with world_of_one():
        sharded = Training(shard)
        sharded.state.give_gradients([[0, 4]])
        for parameter in sharded.model.parameters():
            assert is_dtensor(parameter.grad)
            assert parameter.grad.placements == parameter.placements


WHOLE = ConsistentStep(3, "g1-s3", "", "same")


class Adversaries:
    """Two models with an optimizer each, of which the second one steps seldom."""

    def __init__(self) -> None:
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.often = torch.optim.SGD(self.first.parameters(), lr=0.1)
        self.seldom = torch.optim.SGD(self.second.parameters(), lr=0.1)
        objects = {"first": self.first, "second": self.second, "often": self.often, "seldom": self.seldom}
        self.state = TrainingState(objects)

    def committed_steps(self, body: Callable[[int], None], steps: int = 7) -> list[int]:
        found = []
        for step in range(1, steps):
            body(step)
            if not self.state.accumulates():
                self.state.commit(self.state.take(), WHOLE)
                found.append(step)
        return found


def test_a_step_is_not_committed_while_gradients_of_one_of_two_optimizers_add_up():
    both = Adversaries()

    def body(step: int) -> None:
        both.often.zero_grad()
        both.second(both.first(torch.ones(2))).sum().backward()
        both.often.step()
        if step % 3 == 0:
            both.seldom.step()
            both.seldom.zero_grad()

    assert both.committed_steps(body) == [3, 6]


def test_gradients_that_are_dropped_or_stay_unused_hold_no_step_up():
    both = Adversaries()

    def warms_up(step: int) -> None:  # the first step cannot be told from one that adds up
        both.often.zero_grad()
        both.seldom.zero_grad()
        both.second(both.first(torch.ones(2))).sum().backward()
        both.often.step()

    assert both.committed_steps(warms_up) == [2, 3, 4, 5, 6]
    both = Adversaries()

    def takes_turns(step: int) -> None:
        one, optimizer = (both.second, both.seldom) if step % 3 == 1 else (both.first, both.often)
        optimizer.zero_grad()
        one(torch.ones(2)).sum().backward()
        optimizer.step()

    assert both.committed_steps(takes_turns) == [1, 2, 3, 4, 5, 6]


def test_gradients_written_after_an_optimizers_own_step_hold_no_step_up():
    both = Adversaries()

    def body(step: int) -> None:  # as a discriminator gets gradients by the generator's loss
        both.often.zero_grad()
        both.first(torch.ones(2)).sum().backward()
        both.often.step()
        both.seldom.zero_grad()
        both.first(both.second(torch.ones(2))).sum().backward()
        both.seldom.step()

    assert both.committed_steps(body) == [1, 2, 3, 4, 5, 6]


def test_a_frozen_parameter_has_the_gradient_of_zero_that_it_had() -> None:
    """With zero_grad(set_to_none=False) an optimizer moves it on by its momentum; without a gradient it stays."""

    def frozen_after_two(restored: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            if step == 2:
                model.weight.requires_grad_(False)
            if step == 3 and restored:
                existed = gradients.existing(model.parameters())
                optimizer.zero_grad(set_to_none=True)
                gradients.give_zeros([model], existed)
            optimizer.zero_grad(set_to_none=False)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return model.weight.detach()

    assert torch.equal(frozen_after_two(restored=True), frozen_after_two(restored=False))
