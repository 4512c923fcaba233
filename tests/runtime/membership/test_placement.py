"""Where copies go, under random nodes, racks and losses."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext.runtime.membership.placement import Placement, place_replicas

nodes_in_racks = st.dictionaries(st.integers(0, 200), st.sampled_from("abcd"), min_size=1, max_size=40)
replicas = st.integers(1, 3)


def load(placed: Placement) -> Counter[int]:
    return Counter(holder for holders in placed.values() for holder in holders)


@given(nodes_in_racks, replicas)
def test_every_node_has_as_many_other_holders_as_there_can_be(nodes, replicas):
    placed = place_replicas(nodes, replicas)
    assert placed.keys() == nodes.keys()
    for node, holders in placed.items():
        assert len(holders) == len(set(holders)) == min(replicas, len(nodes) - 1)
        assert node not in holders
        assert set(holders) <= nodes.keys()


@given(nodes_in_racks, replicas)
def test_no_node_holds_more_than_one_snapshot_too_many(nodes, replicas):
    assert max(load(place_replicas(nodes, replicas)).values(), default=0) <= replicas + 1


@given(st.integers(1, 40), replicas)
def test_within_one_rack_everyone_holds_equally_much(count, replicas):
    assert set(load(place_replicas(dict.fromkeys(range(count), "a"), replicas)).values()) <= {min(replicas, count - 1)}


@given(nodes_in_racks, replicas)
def test_copies_go_to_another_rack_while_one_has_room(nodes, replicas):
    placed = place_replicas(nodes, replicas)
    roomy = {node for node in nodes if load(placed)[node] < replicas + 1}
    for node, holders in placed.items():
        for holder in holders:
            taken = {nodes[node], *(nodes[other] for other in holders if other != holder)}
            if nodes[holder] in taken:
                assert not [other for other in roomy - {node, *holders} if nodes[other] not in taken]


@given(nodes_in_racks, replicas, st.data())
def test_a_loss_moves_only_those_that_lost_a_holder(nodes, replicas, data):
    placed = place_replicas(nodes, replicas)
    for _ in range(3):
        lost = data.draw(st.sets(st.sampled_from(sorted(nodes)), max_size=3)) if nodes else set()
        nodes = {node: rack for node, rack in nodes.items() if node not in lost}
        before, placed = placed, place_replicas(nodes, replicas, placed)
        for node, holders in placed.items():
            if not lost & set(before[node]) and len(before[node]) == min(replicas, len(nodes) - 1):
                assert holders == before[node]
            assert len(set(holders) - {node}) == min(replicas, len(nodes) - 1)
        most, held = max(replicas + 1, min(replicas, len(nodes) - 1)), load(placed)
        roomy = {node for node in nodes if held[node] < most}
        for node, holders in placed.items():
            if any(held[holder] > most for holder in holders) and holders != before[node]:
                assert roomy <= {node, *holders}  # what it would be better held by, holds it already


def test_the_one_that_is_placed_last_need_not_overload_another():
    nodes = dict(enumerate("aabdabccc"))
    before = place_replicas(nodes, 3)
    placed = place_replicas({node: rack for node, rack in nodes.items() if node > 2}, 3, before)
    assert max(load(placed).values()) <= 4


@given(nodes_in_racks, replicas)
def test_the_order_of_the_nodes_does_not_matter(nodes, replicas):
    assert place_replicas(nodes, replicas) == place_replicas(dict(reversed(nodes.items())), replicas)


def test_pairs_across_racks_and_a_ring_of_three_for_the_odd_one_out():
    assert place_replicas({0: "a", 1: "a", 2: "b", 3: "b"}, 1) == {0: (2,), 2: (0,), 1: (3,), 3: (1,)}
    assert place_replicas(dict.fromkeys(range(3), "a"), 1) == {0: (1,), 1: (2,), 2: (0,)}


def test_who_lost_its_partner_gets_another_and_nobody_else_moves():
    before = place_replicas(dict.fromkeys(range(6), "a"), 1)
    assert before == {0: (3,), 3: (0,), 1: (4,), 4: (1,), 2: (5,), 5: (2,)}
    after = place_replicas(dict.fromkeys(range(1, 6), "a"), 1, before)
    assert {node: holders for node, holders in after.items() if before[node] != holders} == {3: after[3]}


def test_no_copies_are_no_placement():
    with pytest.raises(ValueError, match="0 replicas"):
        place_replicas({0: "a", 1: "a"}, 0)


def test_16384_nodes_are_placed_in_seconds():
    nodes = {node: f"rack {node // 32}" for node in range(16384)}
    placed = place_replicas(nodes, 1)
    assert all(nodes[node] != nodes[holder] for node, (holder,) in placed.items())
    assert all(placed[holder] == (node,) for node, (holder,) in placed.items())
