"""When live state may be offered to others, and when not."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn
from world_of_one import world_of_one

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.snapshot.image import Layout, views
from hyperpod_ext.runtime.snapshot.snapshot import Snapshot
from hyperpod_ext.runtime.state.seeding import seed_of, seed_step
from hyperpod_ext.runtime.state.training_state import ConsistentStep, TrainingState

WHOLE = ConsistentStep(3, "g1-s3", "", "same")


def commit(state: TrainingState) -> None:
    captured = state.take()
    state.commit(captured, replace(WHOLE, own_digest=captured.own_digest()))


def is_whole(state: TrainingState) -> bool:
    """Whether it may be offered, as what was committed."""
    consistent = state.consistent_step()
    assert consistent is None or replace(consistent, own_digest="") == WHOLE
    return consistent is not None


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
        commit(self.state)

    def backward(self) -> None:
        self.model(torch.randn(8, 4)).sum().backward()


@pytest.fixture
def trained() -> Trained:
    return Trained()


def test_untouched_state_is_whole(trained):
    assert is_whole(trained.state)


def test_gradients_alone_do_not_touch_it(trained):
    trained.model.eval()
    trained.backward()
    assert is_whole(trained.state)


TOUCHES = (
    *("a forward with statistics", "statistics written through .data"),
    *("an optimizer step", "a schedule step", "a parameter", "a parameter through .data", "a parameter's memory"),
    *("swapped tensors", "a view through .data"),
)


@pytest.mark.parametrize("touch", TOUCHES)
def test_state_is_no_longer_whole_after(trained, touch):
    match touch:
        case "a forward with statistics":
            trained.model(torch.randn(8, 4))
        case "statistics written through .data":  # as codebooks are, in the forward pass of a VQ-VAE
            trained.model[1].running_mean.data.mul_(0.9)
        case "an optimizer step":
            trained.optimizer.step()
        case "a schedule step":
            trained.schedule.step()
        case "a parameter":
            with torch.no_grad():
                next(trained.model.parameters()).add_(1)
        case "a parameter through .data":
            trained.model[0].weight.data.copy_(torch.zeros(4, 4))
        case "a view through .data":
            trained.model.state_dict()["0.weight"][1:].data.zero_()
        case "a parameter's memory":
            trained.model[0].weight.data = torch.zeros(4, 4)
        case "swapped tensors":
            torch.utils.swap_tensors(trained.model[0].weight, nn.Parameter(torch.zeros(4, 4)))
    assert not is_whole(trained.state)


def test_the_copy_of_a_step_is_finished_before_a_script_gets_data_of_a_saved_parameter():
    model, calls = nn.BatchNorm1d(4), []
    state = TrainingState({"model": model}, before_change=lambda: calls.append(1))
    commit(state)
    model.running_mean.data.mul_(0.9)  # a buffer is copied before the save returns
    torch.rand(3).data.zero_()
    assert not calls
    model.weight.data.norm()
    assert calls == [1]
    assert not is_whole(state)
    model.weight.data.norm()
    assert calls == [1], "nothing is being copied any more"
    commit(state)
    state.close()
    assert model.weight.data is not None
    assert calls == [1]
    assert "data" not in vars(torch.Tensor)


def test_other_threads_and_forked_processes_get_data_without_the_listener():
    model, calls = nn.Linear(2, 2), []
    state = TrainingState({"model": model}, before_change=lambda: calls.append(1))
    commit(state)
    thread = threading.Thread(target=lambda: model.weight.data.norm())
    thread.start()
    thread.join()
    if (pid := os.fork()) == 0:  # as a DataLoader's worker
        os._exit(len(calls) if model.weight.data is not None and not calls else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert not calls
    state.close()


def test_an_object_may_give_data_of_its_tensors_as_its_state():
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def state_dict(self, *args, **options):
            return {"w": self.w.data}

    state = TrainingState({"model": Gives()})
    commit(state)
    assert is_whole(state)


class Average:
    def __init__(self, model: nn.Module) -> None:
        self.values = [parameter.detach() * 2 for parameter in model.parameters()]

    def state_dict(self) -> dict:
        return {"values": self.values}

    def load_state_dict(self, state: dict) -> None:
        for mine, saved in zip(self.values, state["values"], strict=True):
            mine.copy_(saved)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("order", [("model", "average"), ("average", "model")])
def test_a_swap_that_a_fault_cut_short_leaves_no_two_tensors_in_one_memory(order, tied):
    model = nn.Linear(4, 4)
    objects = {"model": model, "average": Average(model)}
    if tied:
        objects["average"].values = [parameter.data for parameter in model.parameters()]
    state = TrainingState({name: objects[name] for name in order})
    layout = Layout(state.take().parts)
    image = memoryview(bytearray(layout.plan.nbytes))
    for view, local in zip(views(layout.plan, image), layout.locals, strict=True):
        view.copy_(local)
    saved = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter, value in zip(model.parameters(), objects["average"].values, strict=True):
        parameter.data = value
    state.load([Snapshot(3, layout.plan, state.take().parts.values, lambda: image)])
    for parameter, value, before in zip(model.parameters(), objects["average"].values, saved, strict=True):
        assert torch.equal(parameter, before)
        assert torch.equal(value, before if tied else before * 2)
        assert (parameter.data_ptr() == value.data_ptr()) == tied


def test_own_digests_differ_only_by_what_is_each_ranks_own(trained):
    before = trained.state.take().own_digest()
    with torch.no_grad():
        next(trained.model.parameters()).add_(1)
    assert trained.state.take().own_digest() == before
    trained.model(torch.randn(8, 4))
    assert trained.state.take().own_digest() != before


def snapshot_of(state: TrainingState) -> Snapshot:
    parts = state.take().parts
    layout = Layout(parts)
    image = bytearray(layout.plan.nbytes)
    for live, view in zip(layout.locals, views(layout.plan, image), strict=True):
        view.copy_(live)
    return Snapshot(3, layout.plan, parts.values, lambda: memoryview(image))


def test_state_moves_to_another_process_bit_for_bit(trained):
    other = Trained()
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.fill_(0.5)
    other.schedule.step()
    assert other.state.digest() != trained.state.digest()
    other.state.load([snapshot_of(trained.state)])
    assert other.state.digest() == trained.state.digest()


def test_a_model_built_differently_is_named():
    narrow, wide = nn.Linear(2, 2), nn.Linear(3, 2)
    with pytest.raises(JobFailedError, match=r"model\.weight has shape \(2, 3\) here and \(2, 2\) in the snapshot"):
        TrainingState({"model": wide}).load([snapshot_of(TrainingState({"model": narrow}))])


def test_other_names_are_named():
    model = nn.Linear(2, 2)
    with pytest.raises(JobFailedError, match=r"holds the objects \['model'\], but this rank has registered \['net'\]"):
        TrainingState({"net": model}).load([snapshot_of(TrainingState({"model": model}))])


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


class Copying(nn.Linear):
    """A module whose state_dict() gives copies, as adapters and offloaded modules do."""

    def state_dict(self, *args, **kwargs):
        return {name: tensor.detach().clone() for name, tensor in super().state_dict(*args, **kwargs).items()}


def test_a_module_that_gives_copies_of_its_state_is_restored_too():
    saved, fresh = Copying(2, 2), Copying(2, 2)
    TrainingState({"model": fresh}).load([snapshot_of(TrainingState({"model": saved}))])
    assert torch.equal(fresh.weight, saved.weight)


def test_state_on_which_a_restore_began_is_offered_to_nobody(trained):
    narrow = TrainingState({"model": nn.Linear(2, 2)})
    with pytest.raises(JobFailedError):
        trained.state.load([snapshot_of(narrow)])
    following = TrainingState({"model": trained.model}, before=trained.state)
    with pytest.raises(JobFailedError):
        following.load([snapshot_of(narrow)])
    assert not is_whole(following)


def test_parts_of_a_rank_that_autograd_does_not_follow_are_no_obstacle():
    model = nn.Linear(2, 2)
    with torch.inference_mode():
        model.register_buffer("seen", torch.ones(2))
    state = TrainingState({"model": model})
    commit(state)
    assert is_whole(state)


OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "Adagrad": {},
    "Adadelta": {},
    "Adafactor": {},
    "ASGD": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "LBFGS": {"max_iter": 3},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_goes_on_from_another_ranks_state_bit_for_bit(name):
    def make() -> tuple[nn.Module, torch.optim.Optimizer, TrainingState]:
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return model, optimizer, TrainingState({"model": model, "optimizer": optimizer, "schedule": schedule})

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x = torch.full((4, 5), float(number))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    model, optimizer, state = make()
    for number in range(3):
        step(model, optimizer, number)
    new_process, its_optimizer, its_state = make()
    its_state.load([snapshot_of(state)])
    assert its_state.digest() == state.digest()
    commit(state)
    for number in (3, 4):
        step(model, optimizer, number)
        step(new_process, its_optimizer, number)
    assert its_state.digest() == state.digest()
    assert state.is_reported
    assert not is_whole(state)


def test_a_step_that_a_fault_cut_short_is_made_again_with_loss_scaling():
    model = nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    state = TrainingState({"model": model, "optimizer": optimizer, "scaler": scaler})
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)  # here the fault comes
    state.clear_gradients()
    assert model.weight.grad is None
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def test_gradients_that_wait_for_the_optimizer_are_no_moment_to_go_on_from(trained):
    trained.state.clear_gradients()
    commit(trained.state)
    trained.model.eval()
    trained.backward()
    assert trained.state.accumulates()
    trained.optimizer.step()
    assert not trained.state.accumulates()


def test_objects_built_anew_take_over_what_they_replace(trained):
    digest = trained.state.digest()
    anew = Trained.__new__(Trained)
    anew.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(anew.model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    objects = {"model": anew.model, "optimizer": optimizer, "schedule": schedule}
    state = TrainingState(objects, before=trained.state)
    assert not is_whole(state)
    state.adopt()
    assert is_whole(state)
    assert state.digest() == digest


def test_objects_built_anew_take_over_nothing_that_has_changed(trained):
    trained.optimizer.step()
    state = TrainingState({"model": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))}, before=trained.state)
    state.adopt()
    assert not is_whole(state)


class NamesOfItsOwn(nn.Linear):
    """As Megatron's DDP, which keeps a list where modules have a method."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.buffers = []


def test_a_module_with_an_attribute_named_buffers_is_restored():
    saved, fresh = NamesOfItsOwn(), NamesOfItsOwn()
    TrainingState({"model": fresh}).load([snapshot_of(TrainingState({"model": saved}))])
    assert torch.equal(fresh.weight, saved.weight)


def test_what_a_scaler_left_on_an_optimizer_for_a_step_that_did_not_end_is_forgotten():
    """Fused optimizers unscale by it; it would be multiplied with that of the next step."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def abort(*_: object) -> None:
        raise RuntimeError("the generation is over")

    hook = optimizer.register_step_pre_hook(abort)
    scaler.scale(model(torch.ones(2, 3)).mean()).backward()
    with pytest.raises(RuntimeError, match="is over"):
        scaler.step(optimizer)
    hook.remove()
    TrainingState({"model": model, "optimizer": optimizer, "scaler": scaler}).clear_gradients()
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_an_optimizer_that_is_sharded_by_itself_is_refused_by_its_name():
    """torch's own error came at the first step, and the job was started again for it."""
    with world_of_one():
        from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns as it is loaded

        optimizer = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), optimizer_class=torch.optim.AdamW)
        with pytest.raises(JobFailedError, match=r"restore\(optimizer=...\): ZeroRedundancyOptimizer is not supported"):
            TrainingState({"optimizer": optimizer})


def test_a_disabled_scaler_is_state_as_any_other():
    """Scripts that may run in bfloat16 have one; on a machine without CUDA, one for CUDA disables itself."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    state = TrainingState({"scaler": scaler})
    state.clear_gradients()
    assert state.take().parts.tensors == []
