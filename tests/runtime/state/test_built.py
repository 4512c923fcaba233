"""State that training changes in more than its values: a new process and a survivor are brought to what was saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from world_of_one import world_of_one

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.snapshot.image import Layout, views
from hyperpod_ext.runtime.snapshot.layout_plan import read_plan
from hyperpod_ext.runtime.snapshot.snapshot import Snapshot
from hyperpod_ext.runtime.state.training_state import TrainingState


def snapshot_of(state: TrainingState) -> Snapshot:
    """What is saved of it, read from JSON."""
    captured = state.take()
    layout = Layout(captured.parts)
    image = bytearray(layout.plan.nbytes)
    for place, tensor in zip(views(layout.plan, image), layout.locals, strict=True):
        place.copy_(tensor)
    changes, values = json.loads(json.dumps([state.existing_and_changed(captured)[1], captured.parts.values]))
    plan = read_plan(json.loads(layout.plan.text), layout.plan.digest)
    return Snapshot(0, plan, values, lambda: memoryview(image), {"changes": changes})


def restore(state: TrainingState, snapshot: Snapshot) -> None:
    """As `run.restore` does."""
    state.load([snapshot])
    state.set_flags(snapshot.extras.get("changes", {}))
    state.clear_gradients()


class Tasks(nn.Module):
    """Layers of which a step may use any."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        for number in used:
            x = self.layers[number](x)
        return x


class Training:
    """A script's objects, and its step."""

    def __init__(
        self,
        wrap: Callable[[nn.Module], object] = lambda model: None,
        optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    ) -> None:
        torch.manual_seed(0)
        self.model = Tasks()
        wrap(self.model)
        self.optimizer = optimizer(self.model.parameters())
        self.state = TrainingState({"optimizer": self.optimizer, "model": self.model})

    def step(self, number: int, *used: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.full((2, 4), 1.0 + number), used).square().sum().backward()
        self.optimizer.step()


def shard(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.fixture(params=["plain", "FSDP2"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Training]]:
    with world_of_one() if request.param == "FSDP2" else nullcontext():
        yield lambda **more: Training(shard if request.param == "FSDP2" else lambda model: None, **more)


def numbers(training: Training) -> set[int]:
    """Parameters that the optimizer has state of."""
    return set(training.optimizer.state_dict()["state"])


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "NAdam": {},
    "Adagrad": {},
    "ASGD": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
}


def test_an_evaluation_at_the_end_of_a_step_changes_nothing(make):
    """The root of FSDP2 modules keeps its parameters unsharded after a forward pass without gradients."""
    training = make()
    training.step(1, 0, 1)
    with torch.no_grad():
        training.model(torch.ones(2, 4), (0, 1))
    existing, changes = training.state.existing_and_changed(training.state.take(step_ended=True))
    assert (existing, changes) == ([[0, 4]], {"optimizers": {"optimizer": "AdamW"}})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_that_never_had_a_gradient_has_no_state_after_a_restore_either(make, name):
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        kind: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, lr=0.1, **OPTIMIZERS[name])
        return kind

    undisturbed, new = make(optimizer=optimizer), make(optimizer=optimizer)
    for number in (1, 2):
        undisturbed.step(number, 0, 2)
    restore(new.state, snapshot_of(undisturbed.state))
    assert numbers(new) == numbers(undisturbed)
    for number, used in ((3, (0, 1, 2)), (4, (0, 1))):  # its state begins now, as without the fault
        for each in (undisturbed, new):
            each.step(number, *used)
    assert new.state.digest() == undisturbed.state.digest()


def test_a_survivor_with_more_state_than_the_snapshot_forgets_it(make):
    undisturbed, survivor = make(), make()
    for each in (undisturbed, survivor):
        each.step(1, 0)
    saved = snapshot_of(undisturbed.state)
    survivor.step(2, 0, 1, 2)
    restore(survivor.state, saved)
    assert numbers(survivor) == {0, 1}
    for number in (2, 3):
        for each in (undisturbed, survivor):
            each.step(number, 0, 1)
    assert survivor.state.digest() == undisturbed.state.digest()


def test_a_snapshot_from_before_the_first_step_leaves_no_state(make):
    survivor = make()
    saved = snapshot_of(survivor.state)
    digest = survivor.state.digest()
    survivor.step(1, 0)
    restore(survivor.state, saved)
    assert not survivor.optimizer.state
    assert survivor.state.digest() == digest


@pytest.mark.parametrize("first", [0, 2])
def test_which_parameters_are_trained_is_restored(make, first):
    undisturbed, survivor, new = make(), make(), make()
    frozen = undisturbed.model.layers[first]
    for number in (1, 2):
        for each in (undisturbed, survivor):
            each.step(number, 0, 1, 2)
    frozen.requires_grad_(False)
    undisturbed.step(3, 0, 1, 2)
    saved = snapshot_of(undisturbed.state)
    for each in (survivor, new):
        restore(each.state, saved)
        assert [p.requires_grad for p in each.model.parameters()] == [
            p.requires_grad for p in undisturbed.model.parameters()
        ]
    for each in (undisturbed, survivor, new):
        each.step(4, 0, 1, 2)
    assert new.state.digest() == survivor.state.digest() == undisturbed.state.digest()


def test_a_survivor_trains_again_what_it_froze_after_the_snapshot(make):
    survivor = make()
    survivor.step(1, 0)
    saved = snapshot_of(survivor.state)
    survivor.model.layers[0].requires_grad_(False)
    restore(survivor.state, saved)
    assert all(parameter.requires_grad for parameter in survivor.model.parameters())


def test_a_script_that_freezes_something_else_than_the_one_that_saved_is_followed(make):
    before, after = make(), make()
    before.model.layers[0].requires_grad_(False)
    saved = snapshot_of(before.state)
    after.model.layers[1].requires_grad_(False)
    following = TrainingState({"optimizer": after.optimizer, "model": after.model})
    following.load([saved])
    following.set_flags(saved.extras["changes"])
    assert [layer.weight.requires_grad for layer in after.model.layers] == [True, False, True]


def test_the_mode_of_each_module_is_restored():
    trained, survivor, new = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()) for _ in range(3))
    states = [TrainingState({"model": model}) for model in (trained, survivor, new)]
    before = snapshot_of(states[0])
    trained[1].eval()
    saved = snapshot_of(states[0])
    survivor.eval()  # a fault strikes while it is evaluated
    restore(states[1], before)
    assert [module.training for module in survivor.modules()] == [True] * 4
    for state, model in ((states[1], survivor), (states[2], new)):
        restore(state, saved)
        assert [module.training for module in model.modules()] == [True, True, False, True]


def first_layer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters)[:2], lr=0.1)


def add_group(training: Training, layer: int) -> None:
    training.optimizer.add_param_group({"params": list(training.model.layers[layer].parameters()), "lr": 0.01})


def test_a_parameter_group_that_was_added_is_restored(make):
    undisturbed, survivor, new = (make(optimizer=first_layer) for _ in range(3))
    for each in (undisturbed, survivor):
        each.step(1, 0, 1, 2)
    earlier = snapshot_of(undisturbed.state)
    add_group(undisturbed, 2)
    undisturbed.step(2, 0, 1, 2)
    saved = snapshot_of(undisturbed.state)
    add_group(survivor, 1)  # and then went back
    survivor.step(2, 0, 1, 2)
    restore(survivor.state, earlier)
    assert len(survivor.optimizer.param_groups) == 1
    for each in (survivor, new):
        restore(each.state, saved)
    for each in (undisturbed, survivor, new):
        each.step(3, 0, 1, 2)
    assert new.state.digest() == survivor.state.digest() == undisturbed.state.digest()
    assert new.optimizer.param_groups[1]["lr"] == 0.01
    assert new.optimizer.param_groups[1]["params"][0] is new.model.layers[2].weight


def test_a_group_of_parameters_that_no_object_has_is_refused_where_it_is_added(make):
    training = make()
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(JobFailedError, match="optimizer has been given parameters that were in no module"):
        snapshot_of(training.state)


@pytest.mark.parametrize("earlier_version", [False, True])
def test_another_kind_of_optimizer_is_refused(make, earlier_version):
    saved = snapshot_of(make().state)
    if earlier_version:
        saved.extras["changes"].clear()
    other = make(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(JobFailedError, match=r"optimizer is an optimizer of type SGD here.* (AdamW|momentum)"):
        restore(other.state, saved)


def test_state_in_another_type_than_its_parameter_keeps_it():
    undisturbed, new = Training(lambda model: model.bfloat16()), Training(lambda model: model.bfloat16())
    parameter = undisturbed.model.layers[0].weight
    undisturbed.optimizer.state[parameter] = {"step": torch.tensor(1.0), "master": torch.full((4, 4), 1.0 + 2**-20)}
    restore(new.state, snapshot_of(undisturbed.state))
    assert new.optimizer.state[new.model.layers[0].weight]["master"].dtype == torch.float32
    assert new.state.digest() == undisturbed.state.digest()
    new.state._cast = True
    restore(new.state, snapshot_of(undisturbed.state))
    assert new.optimizer.state[new.model.layers[0].weight]["master"].dtype == torch.bfloat16


class Statistics(nn.Module):
    """A weight, and a buffer that a script may replace."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(32.0).view(1, 2, 4, 4) + 1)
        self.register_buffer("mean", torch.zeros(3))


class Box:
    """An object with a state of its own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def to_float64(model: Statistics) -> None:
    model.mean = model.mean.double() + 1 / 3


def grow(model: Statistics) -> None:
    model.weight = nn.Parameter(torch.cat([model.weight.detach(), model.weight.detach()]))


def grow_in_place(model: Statistics) -> None:
    model.weight.data = torch.cat([model.weight.data, model.weight.data])


def channels_last(model: Statistics) -> None:
    model.to(memory_format=torch.channels_last)


def transpose(model: Statistics) -> None:
    model.weight.data = model.weight.data.transpose(2, 3)


def expand(model: Statistics) -> None:
    model.mean = torch.full((1,), 3.0).expand(3)


def half(model: Statistics) -> None:
    model.bfloat16()


def forms(state: TrainingState) -> list[Any]:
    return [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in state.take().parts.tensors]


@pytest.mark.parametrize("change", [to_float64, grow, grow_in_place, channels_last, transpose, expand, half])
def test_type_shape_and_strides_are_those_that_were_saved(change):
    trained, survivor, new = (Statistics() for _ in range(3))
    states = [TrainingState({"model": model}) for model in (trained, survivor, new)]
    before = snapshot_of(states[0])
    change(trained)
    after = snapshot_of(states[0])
    assert after.plan.items != before.plan.items
    weight = new.weight
    restore(states[2], after)
    assert new.weight is weight, "the optimizer has it"
    change(survivor)
    again = TrainingState({"model": survivor}, before=states[1])
    assert forms(states[2]) == forms(states[0])
    assert states[2].digest() == states[0].digest()
    for snapshot, digest in ((before, TrainingState({"model": Statistics()}).digest()), (after, states[0].digest())):
        restore(again, snapshot)
        assert again.digest() == digest
    assert forms(again) == forms(states[0])


@pytest.mark.parametrize(
    "change", [lambda v: v.double(), lambda v: v[:1], lambda v: v.view(2, 2).t(), lambda v: v[::2]]
)
def test_an_objects_tensor_comes_back_with_the_type_shape_and_strides_that_were_saved(change):
    trained, new = Box(torch.arange(4.0) + 1 / 3), Box(torch.zeros(4))
    saving, loading = TrainingState({"box": trained}), TrainingState({"box": new})
    trained.value = change(trained.value)
    restore(loading, snapshot_of(saving))
    assert forms(loading) == forms(saving)
    assert loading.digest() == saving.digest()


def test_a_module_that_was_built_in_another_type_is_refused_unless_it_is_asked_for():
    saved = snapshot_of(TrainingState({"model": Statistics()}))
    model = Statistics().bfloat16()
    with pytest.raises(JobFailedError, match=r"model.weight has type bfloat16 here and float32 in the snapshot") as why:
        restore(TrainingState({"model": model}), saved)
    assert "cast=True" in why.value.hint
    restore(TrainingState({"model": model}, cast=True), saved)
    assert torch.equal(model.weight, Statistics().bfloat16().weight)


def test_a_module_that_was_built_with_other_strides_keeps_them():
    saved = snapshot_of(TrainingState({"model": Statistics()}))
    model = Statistics().to(memory_format=torch.channels_last)
    restore(TrainingState({"model": model}), saved)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.weight, Statistics().weight)


def test_an_expanded_buffer_is_restored_and_never_half_of_other_values():
    def build(value: float) -> nn.Module:
        model = nn.Module()
        model.register_buffer("mask", torch.full((2, 1), value).expand(2, 3))
        return model

    model = build(0.0)
    restore(TrainingState({"model": model}), snapshot_of(TrainingState({"model": build(5.0)})))
    assert model.mask.stride() == (1, 0)
    assert torch.equal(model.mask, torch.full((2, 3), 5.0))
    other = nn.Module()
    other.register_buffer("mask", torch.arange(6.0).view(2, 3))
    with pytest.raises(JobFailedError, match=r"model.mask is an expanded view here"):
        restore(TrainingState({"model": model}), snapshot_of(TrainingState({"model": other})))


def test_windows_that_share_memory_are_refused_at_the_first_save():
    model = nn.Module()
    model.register_buffer("windows", torch.arange(6.0).unfold(0, 3, 1))
    with pytest.raises(JobFailedError, match=r"model.windows is a view whose elements share memory"):
        TrainingState({"model": model})


def test_a_module_that_gets_or_loses_tensors_is_refused():
    model = Statistics()
    state = TrainingState({"model": model})
    model.register_buffer("late", torch.zeros(1))
    with pytest.raises(JobFailedError, match=r"model has got late since restore\(\)"):
        snapshot_of(state)
    del model.late, model.mean
    with pytest.raises(JobFailedError, match=r"model has lost mean since restore\(\)"):
        snapshot_of(state)


@pytest.mark.parametrize("tied_first", [False, True])
def test_weights_that_are_tied_or_no_longer_tied_are_refused(tied_first):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    apart = model[1].weight
    if tied_first:
        model[1].weight = model[0].weight
    state = TrainingState({"model": model})
    snapshot_of(state)
    model[1].weight = apart if tied_first else model[0].weight
    with pytest.raises(JobFailedError, match=r"model has tied, or no longer ties, 1.weight since restore\(\)"):
        snapshot_of(state)


def test_a_sharded_tensor_that_changes_its_type_is_refused_where_it_is_saved():
    with world_of_one():
        training = Training(shard)
        training.model.bfloat16()
        with pytest.raises(JobFailedError, match=r"weight was built as float32 .*, and is bfloat16"):
            snapshot_of(training.state)


def test_plans_of_tensors_that_are_as_torch_makes_them_read_as_ever():
    layout = Layout(TrainingState({"model": Statistics()}).take().parts)
    assert all(len(item) == 10 for item in json.loads(layout.plan.text)["items"])
