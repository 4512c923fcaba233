"""Permutations: whole, invertible, like chance, and the same for ever."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import sampler_oracle

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.data.permutation import EXACT_UP_TO, Feistel, Permutation, key_of
from hyperpod_ext.runtime.data.shuffle import BlockShuffle, ids_at, order_of

SIZES = sorted({2**k + d for k in range(19) for d in (-1, 0, 1)} | {4**9 + 1, 100_003})

GOLDEN_10 = [6, 5, 0, 1, 4, 9, 7, 3, 8, 2]
GOLDEN_70000 = [53680, 1425, 4549, 7436, 60166]
GOLDEN_1E12 = [701452904863, 771537452204, 511167484098]
GOLDEN_BLOCKS = [15, 12, 14, 13, 16, 19, 17, 18]


@pytest.mark.parametrize("n", SIZES)
def test_every_item_comes_once_and_is_found_again(n: int) -> None:
    """2**16 + 1 and 2**18 + 1 are where another library's shuffle loses a sample."""
    for permutation in (Permutation(n, key_of("x", n)), Feistel(max(n, 1), key_of("x", n))):
        places = np.arange(n)
        items = permutation.at(places)
        assert (np.bincount(items, minlength=n) == 1).all()
        assert (permutation.place_of(items) == places).all()


@pytest.mark.parametrize("n", [10**9, 10**12, 2**62])
def test_any_part_of_a_huge_permutation_can_be_had_alone(n: int) -> None:
    permutation = Permutation(n, key_of(n))
    places = np.arange(5000) * (n // 5000)
    items = permutation.at(places)
    assert items.min() >= 0
    assert items.max() < n
    assert len(np.unique(items)) == len(np.unique(places))
    assert (permutation.place_of(items) == places).all()
    assert (permutation.at(places[77:99]) == items[77:99]).all()


def test_the_order_is_the_same_for_ever() -> None:
    """A release that changes these numbers loses and repeats samples of every run that goes on with it."""
    assert Permutation(10, key_of("golden")).at(np.arange(10)).tolist() == GOLDEN_10
    assert Permutation(70_000, key_of("golden")).at(np.arange(5)).tolist() == GOLDEN_70000
    assert Permutation(10**12, key_of("golden")).at(np.arange(3)).tolist() == GOLDEN_1E12
    assert ids_at(np.arange(8), 20, BlockShuffle(4, 2), 7, 0, 1).tolist() == GOLDEN_BLOCKS


@pytest.mark.parametrize("n", [1, 2, 17, 257, 1000])
@pytest.mark.parametrize("shuffle", [None, "global", (1, 1), (4, 3), (64, 16)])
def test_the_order_is_the_one_written_out_by_hand(n: int, shuffle: object) -> None:
    order = BlockShuffle(*shuffle) if isinstance(shuffle, tuple) else order_of(shuffle or False)  # type: ignore[arg-type]
    mine = ids_at(np.arange(n), n, order, 3, 1, 2).tolist()
    assert mine == sampler_oracle.epoch_order(n, shuffle, 3, 1, 2, EXACT_UP_TO)
    assert sorted(mine) == [*range(n)]


def test_blocks_stay_near_each_other() -> None:
    order = BlockShuffle(block=100, window=4)
    ids = ids_at(np.arange(100_000), 100_000, order, 0, 0, 0)
    windows = ids.reshape(-1, 400) // 100
    assert {len(np.unique(window)) for window in windows} == {4}
    assert (np.diff(ids) == 1).mean() < 0.02


def chi_square(counts: np.ndarray, expected: float) -> float:
    """How far counts are from chance, in standard deviations of chi-square."""
    freedom = counts.size - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_small_permutations_come_equally_often() -> None:
    """Where 8 Feistel rounds alone are far from chance [over all permutations of 5: z = 33]."""
    n, draws = 5, 12_000
    found = Counter(tuple(Permutation(n, key_of(draw)).at(np.arange(n)).tolist()) for draw in range(draws))
    counts = np.array([found[one] for one in itertools.permutations(range(n))])
    assert abs(chi_square(counts, draws / counts.size)) < 5


def pairs(rounds: int, n: int = 1024, keys: int = 500) -> float:
    """How far from chance it is where two neighbours land, each in one of 32 columns."""
    grid = np.zeros((32, 32))
    for key in range(keys):
        items = Feistel(n, key_of("pairs", key), rounds).at(np.arange(n))
        np.add.at(grid, (items[:-1] % 32, items[1:] % 32), 1)
    return chi_square(grid, (n - 1) * keys / grid.size)


def test_eight_rounds_look_like_chance_and_three_do_not() -> None:
    assert abs(pairs(8)) < 5
    assert abs(pairs(3)) > 50  # this test can fail


@pytest.mark.parametrize("n", [EXACT_UP_TO + 1])
def test_places_and_items_are_unrelated_above_the_exact_sizes(n: int) -> None:
    grid = np.zeros((64, 64))
    for key in range(8):
        items = Permutation(n, key_of("related", key)).at(np.arange(n))
        np.add.at(grid, (np.arange(n) * 64 // n, items * 64 // n), 1)
    assert abs(chi_square(grid.ravel(), 8 * n / 4096)) < 6


@pytest.mark.parametrize("shuffle", ["globl", 3, True])
def test_an_unknown_shuffle_is_refused(shuffle: object) -> None:
    with pytest.raises(JobFailedError, match="shuffle="):
        order_of(shuffle)  # type: ignore[arg-type]


@pytest.mark.parametrize(("block", "window"), [(0, 1), (1, 0), (65536, 2)])
def test_blocks_that_cannot_be_are_refused(block: int, window: int) -> None:
    with pytest.raises(JobFailedError, match="product is at most 65536"):
        BlockShuffle(block, window)
