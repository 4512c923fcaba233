"""Checksums of what ranks hold, and how a difference is told; numbers that are not finite."""

from __future__ import annotations

import pytest
import torch

from hyperpod_ext.runtime.state.nan_guard import finite
from hyperpod_ext.runtime.state.replica_check import checksum, describe, group_by, is_due

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("sums", "told"),
    [
        ([[1], [1], [2], [1]], "rank 2 differs from ranks 0, 1, 3"),
        ([[1], [2], [2], [3]], "ranks 0, 3 differ from ranks 1, 2"),
        ([[1], [2]], "rank 1 differs from rank 0"),
    ],
)
def test_the_odd_ones_out_are_named(sums, told):
    assert describe(group_by(dict(enumerate(sums)))) == told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_one_flipped_bit_changes_the_checksum(dtype):
    tensor = torch.ones(33).to(dtype)
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    tensor.view(torch.uint8)[-1] ^= 1
    assert checksum(tensor) != before


def test_when_ranks_compare():
    assert [step for step in range(1, 12) if is_due(step, 5)] == [1, 5, 10]
    assert not any(is_due(step, 0) for step in range(12))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_number_that_is_none_is_seen_anywhere(bad, dtype):
    tensors = [torch.ones(100, dtype=dtype), torch.ones(7, 3, dtype=dtype)]
    assert finite(tensors, CPU)
    tensors[1][6, 2] = bad
    assert not finite(tensors, CPU)


def test_nothing_is_finite_and_so_are_integers():
    assert finite([], CPU)
    assert finite([torch.tensor([1, 2]), torch.empty(0)], CPU)
