"""What a reproducible wrapper refuses, and what becomes of numbers that are not finite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from world_of_one import world_of_one

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.reproducible import reproducible
from hyperpod_ext.runtime.torch_requirements.private_names import Feature, missing


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with world_of_one():
        yield


def needs_own_sums() -> None:
    if missing(Feature.REPRODUCIBLE_FSDP2):
        pytest.skip("this torch takes no sums of ours for FSDP2")


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    needs_own_sums()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, _ = small()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("make", [small, sharded])
def test_gradients_are_the_sum_over_micro_batches(make):
    model, optimizer = make()
    x = torch.randn(12, 4)
    plain, _ = small()
    plain(x).square().sum().backward()
    wanted = [parameter.grad for parameter in plain.parameters()]
    parallel = reproducible(model)
    for part in x.split(3):
        parallel(part).square().sum().backward()
    parallel.reduce()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        found = getattr(parameter.grad, "_local_tensor", parameter.grad)
        torch.testing.assert_close(found, gradient)
    whole = torch.cat([gradient.flatten() for gradient in wanted]).norm()
    assert parallel.clip_grad_norm_(1.0).item() == pytest.approx(whole.item(), rel=1e-5)
    assert parallel.clip_grad_norm_(1.0).item() == pytest.approx(1.0, rel=1e-5), "they are clipped"
    optimizer.step()


@pytest.mark.parametrize("make", [small, sharded])
def test_an_optimizer_does_not_step_without_reduction(make):
    model, optimizer = make()
    parallel = reproducible(model)
    parallel(torch.ones(2, 4)).sum().backward()
    with pytest.raises(JobFailedError, match="gradients of 1 micro-batches are not reduced") as caught:
        optimizer.step()
    assert "reduce()" in caught.value.hint
    other, others = small()
    other(torch.ones(2, 4)).sum().backward()
    others.step()  # whose parameters are its own
    parallel.reduce()
    optimizer.step()


def test_a_rank_without_a_micro_batch_reduces_once_a_step_as_others_do():
    model, optimizer = small()
    parallel = reproducible(model)
    reduce, reduced = parallel.reduce, list[int]()
    parallel.reduce = lambda: (reduced.append(len(reduced)), reduce())[1]
    for micro_batches in (1, 0, 2, 0, 0):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            parallel(torch.ones(2, 4)).sum().backward()
        before = len(reduced)
        norm = parallel.clip_grad_norm_(1.0)
        assert len(reduced) == before + 1
        if micro_batches:
            assert parallel.norm() <= norm
            assert len(reduced) == before + 1
        optimizer.step()


@pytest.mark.parametrize("make", [small, sharded])
def test_gradients_of_the_last_step_are_not_added_to(make):
    model, optimizer = make()
    parallel = reproducible(model)
    parallel(torch.ones(2, 4)).sum().backward()
    parallel.reduce()
    with pytest.raises(JobFailedError, match="of the last step still exist") as caught:
        parallel(torch.ones(2, 4)).sum().backward()
    assert "zero_grad" in caught.value.hint
    optimizer.zero_grad()
    parallel(torch.ones(2, 4)).sum().backward()
    parallel.reduce()


@pytest.mark.parametrize("make", [small, sharded])
def test_what_is_not_finite_is_seen_in_the_gradients(make):
    model, optimizer = make()
    parallel = reproducible(model)
    for factor in (1.0, float("inf"), 1.0):
        (parallel(torch.ones(2, 4)).sum() * factor).backward()
    assert parallel.norm().isnan()
    optimizer.zero_grad()
    parallel(torch.ones(2, 4)).sum().backward()
    assert parallel.norm().isfinite(), "and is gone with its step"


def test_a_parameter_that_nobody_used_has_no_gradient():
    model, _ = small()
    parallel = reproducible(model)
    model[0](torch.ones(2, 4)).sum().backward()
    parallel.reduce()
    assert model[0].weight.grad is not None
    assert model[1].weight.grad is None


def test_a_second_wrapper_takes_the_place_of_the_first():
    model, _ = small()
    first = reproducible(model)
    first(torch.ones(2, 4)).sum().backward()
    second = reproducible(model)
    second(torch.ones(2, 4)).sum().backward()
    second.reduce()
    model_of_once, _ = small()
    model_of_once(torch.ones(2, 4)).sum().backward()
    assert torch.equal(model[0].weight.grad, model_of_once[0].weight.grad)
    assert first.count == 0


def test_a_step_of_too_many_micro_batches():
    model, _ = small()
    parallel = reproducible(model)
    parallel.count = 16384
    with pytest.raises(JobFailedError, match="the step has 16385 micro-batches"):
        parallel(torch.ones(2, 4)).sum().backward()


def test_what_depends_on_the_number_of_ranks_is_refused():
    with pytest.raises(JobFailedError, match=r"1 \(BatchNorm1d\) keeps statistics"):
        reproducible(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    reproducible(nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)))
    with pytest.raises(JobFailedError, match=r"weight is torch.float64"):
        reproducible(nn.Linear(2, 2, dtype=torch.float64))


def test_fsdp_around_a_part_only():
    needs_own_sums()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, _ = small()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(JobFailedError, match=r"1.weight belongs to no FSDP2 module"):
        reproducible(model)
