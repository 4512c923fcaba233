"""Bins: what is left of a sum depends on what was added, not on when nor where."""

from __future__ import annotations

import math
import random

import pytest
import torch
from world_of_one import world_of_one

from hyperpod_ext.runtime.reproducible.bins import BAD, MOST, NONE, Sum, bin_of, largest_of, value_of
from hyperpod_ext.runtime.reproducible.sharded import norm_of

LARGEST = torch.finfo(torch.float32).max
SMALLEST = 2.0**-149


def add_all(tensors: list[torch.Tensor]) -> Sum:
    held = Sum(tensors[0].numel(), torch.device("cpu"))
    for tensor in tensors:
        held.add(tensor, bin_of(tensor.abs().max().item()))
    return held


def together(parts: list[list[torch.Tensor]]) -> torch.Tensor:
    """The sum over ranks, of which each has a part."""
    sums = [add_all(part) for part in parts if part]
    top = max(held.top for held in sums)
    for held in sums:
        held.raise_to(top)
    return value_of(torch.stack([held.packed() for held in sums]).sum(0), top)


@pytest.mark.parametrize("seed", range(60))
def test_neither_order_nor_ranks_matter(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    spread = draw.choice([0, 3, 40, 130])
    count = draw.randint(1, 24)
    values = [torch.randn(50) * 2.0 ** draw.randint(-spread, min(spread, 120)) for _ in range(count)]
    wanted = together([values])
    for _ in range(4):
        draw.shuffle(values)
        ranks = draw.randint(1, 6)
        cuts = sorted(draw.randint(0, count) for _ in range(ranks - 1))
        parts = [values[begin:end] for begin, end in zip([0, *cuts], [*cuts, count], strict=True)]
        assert torch.equal(together(parts), wanted)


@pytest.mark.parametrize("seed", range(20))
def test_the_sum_is_as_good_as_promised(seed):
    torch.manual_seed(seed)
    values = [torch.randn(200) * 2.0 ** random.Random(seed).randint(-90, 90) for _ in range(30)]
    exact = torch.stack(values).double().sum(0)
    largest = torch.stack(values).abs().max().item()
    assert (together([values]).double() - exact).abs().max() <= 30 * largest * 2.0**-32 + exact.abs().max() * 2.0**-24


def test_one_number_that_fits_is_itself():
    for value in (1.0, -1.0, math.pi, 1e-30, -3e38, LARGEST, 0.0, 2.0**-126):
        number = torch.tensor([value])
        assert torch.equal(together([[number]]), number)


def test_as_many_of_the_largest_as_are_allowed_do_not_overflow():
    """The bound: all bits set in every bin."""
    for sign in (1, -1):
        held = Sum(1, torch.device("cpu"))
        largest = torch.tensor([sign * math.nextafter(2.0**16, 0)], dtype=torch.float64).float()
        almost = torch.tensor([sign * (2.0**16 - 2.0**-8)])  # the largest float32 below 2^16
        assert bin_of(almost.abs().item()) == 0
        assert bin_of(largest.abs().item()) == 1, "rounded up to 2^16"
        for _ in range(4):
            held.add(almost, 0)
        held.bins *= MOST // 4
        assert held.packed().item() == sign * MOST * ((2**16 - 2**-8) * 2**32)
        full = torch.full((3, 1), sign * (2**16 - 1) * MOST, dtype=torch.int64)
        assert full.abs().max() < 2**31
        packed = (full[0] << 32) + (full[1] << 16) + full[2]
        assert packed.item() == sign * MOST * (2**48 - 1)


def test_bins_of_all_magnitudes():
    assert bin_of(SMALLEST) == bin_of(0.0) == -7
    assert bin_of(LARGEST) == 7
    assert [bin_of(2.0**e) for e in (-1, 0, 15, 16, -17)] == [-1, 0, 0, 1, -2]
    assert bin_of(math.nan) == bin_of(math.inf) == BAD
    assert NONE < -7


def test_the_largest_of_each():
    tensors = [torch.tensor([1.0, -3.0]), torch.zeros(0), torch.tensor([math.nan, 9.0]), torch.tensor([-math.inf, 1.0])]
    first, empty, nan, infinite = largest_of(tensors)
    assert (first, empty, infinite) == (3.0, 0.0, math.inf)
    assert math.isnan(nan)
    assert largest_of([]) == []


def test_what_is_not_finite_wins_whatever_follows():
    held = add_all([torch.ones(3), torch.tensor([1.0, math.nan, 2.0]), torch.ones(3)])
    assert held.top == BAD
    assert value_of(held.packed(), held.top).isnan().all()
    held.clear()
    held.add(torch.ones(3), 0)
    assert torch.equal(value_of(held.packed(), held.top), torch.ones(3))


@pytest.fixture
def group():
    with world_of_one() as world:
        yield world


def test_norm(group):
    torch.manual_seed(0)
    shards = [torch.randn(1000) * 1e-6, torch.randn(10), torch.zeros(0), torch.zeros(5)]
    wanted = torch.cat(shards).double().norm().float()
    cpu = torch.device("cpu")
    assert norm_of(shards, group, cpu) == pytest.approx(wanted.item(), rel=1e-6)
    whole = torch.cat(shards)
    order = torch.randperm(whole.numel())
    assert torch.equal(norm_of(list(whole[order].split(77)), group, cpu), norm_of(shards, group, cpu))
    assert norm_of([torch.zeros(4)], group, cpu) == 0
    assert norm_of([torch.tensor([1.0, math.nan])], group, cpu).isnan()
    assert norm_of([torch.tensor([math.inf])], group, cpu).isnan()
    assert torch.isinf(norm_of([torch.full((4,), LARGEST)], group, cpu)), "as float32 has no such number"
