"""Which node gets which ranks, beside every way there is at small sizes."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest

from hyperpod_ext.config.elastic import Elastic
from hyperpod_ext.runtime.membership.rank_assignment import (
    Scale,
    assign_ranks,
    blocks_of,
    choose_staying,
    local_share,
    moved_ranks,
    overlap,
    ranks_of,
)


def common(before: list[int], after: list[int]) -> int:
    places = [(before.index(node), block) for block, node in enumerate(after) if node in before]
    return sum(overlap(old, len(before), new, len(after)) for old, new in places)


def worlds(most: int = 5):
    """Every world of up to `most` nodes that follows one of up to `most`, with as many joining nodes as are needed."""
    for count in range(1, most + 1):
        before = list(range(count))
        for size in range(1, most + 1):
            for staying in range(max(0, size - most), min(count, size) + 1):
                for kept in combinations(before, staying):
                    yield before, {*kept, *range(100, 100 + size - staying)}


def test_as_much_stays_local_as_in_the_best_of_all_orders():
    checked = 0
    for before, nodes in worlds():
        best = max(common(before, list(order)) for order in permutations(nodes))
        found = assign_ranks(before, nodes, sharded=True)
        assert set(found) == nodes
        assert common(before, found) == best, (before, nodes, found)
        checked += 1
    assert checked > 200


def test_the_figures_of_worlds_too_large_to_try():
    """Grown from 8 to 12, two thirds stay; shrunk from 12 to 6, the half."""
    for count, size, share in ((8, 12, 0.667), (12, 6, 0.5), (64, 96, 0.667)):
        before = list(range(count))
        nodes = set(before[:size]) if size < count else {*before, *range(100, 100 + size - count)}
        if size < count:
            nodes = set(choose_staying(before, nodes | set(before), size, sharded=True))
        assert local_share(before, assign_ranks(before, nodes, sharded=True)) == pytest.approx(share, abs=0.01)


def test_where_every_node_has_all_whoever_can_keeps_its_ranks():
    for before, nodes in worlds(4):
        found = assign_ranks(before, nodes, sharded=False)
        assert set(found) == nodes
        assert len(found) == len(nodes)
        kept = [node for block, node in enumerate(before) if node in nodes and block < len(nodes)]
        assert all(found[before.index(node)] == node for node in kept)


def test_those_stay_with_whom_most_stays_local():
    for count in range(2, 7):
        before = list(range(count))
        for size in range(1, count):
            best = max(
                common(before, list(order)) for kept in combinations(before, size) for order in permutations(kept)
            )
            found = choose_staying(before, before, size, sharded=True)
            assert len(found) == size
            assert common(before, assign_ranks(before, found, sharded=True)) == best
    assert choose_staying([5, 6, 7], [5, 7], 1, sharded=False) == [5]


def test_processes_that_stay_keep_their_place_on_their_node():
    before, after = {0: 4, 1: 4, 2: 7, 3: 7}, ranks_of([7, 9, 4], 2)
    assert moved_ranks(before, after, 2) == {2: 0, 3: 1, 0: 4, 1: 5}
    assert blocks_of(after, 2) == [7, 9, 4]


def test_numbers_that_do_not_divide_the_batch_are_left_out():
    scale = Scale.of(Elastic(min_nodes=1, max_nodes=5), 2, 2, 24)
    assert scale is not None
    assert scale.sizes == (1, 2, 3, 4)
    among_ranks = Scale.of(Elastic(min_nodes=1, max_nodes=5), 2, 2, 12)  # on 4 nodes there are 8
    assert among_ranks is not None
    assert among_ranks.sizes == (1, 2, 3)
    assert (scale.most(5), scale.most(3), scale.most(0)) == (4, 3, None)
    assert Scale.of(Elastic(min_nodes=2, max_nodes=8, sizes=(2, 4, 8)), 4, 1).sizes == (2, 4, 8)
    assert Scale.of(None, 2, 2).sizes == (2,)
