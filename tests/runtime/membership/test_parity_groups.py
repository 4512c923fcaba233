"""Which nodes keep parity of each other, under random nodes, racks and losses."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext.runtime.membership.parity_groups import place_groups

nodes_in_racks = st.dictionaries(st.integers(0, 200), st.sampled_from("abcd"), min_size=1, max_size=40)
sizes = st.integers(3, 6)


def assert_groups(groups, nodes, size):
    members = [node for group in groups for node in group]
    assert sorted(members) == sorted(nodes) if len(nodes) >= size else not members
    assert all(size <= len(group) < 2 * size for group in groups)
    assert all(list(group) == sorted(group) for group in groups)


@given(nodes_in_racks, sizes)
def test_every_node_is_in_one_group_and_none_is_too_small(nodes, size):
    assert_groups(place_groups(nodes, size), nodes, size)


@given(nodes_in_racks, sizes)
def test_a_rack_is_spread_over_groups_as_evenly_as_can_be(nodes, size):
    groups = place_groups(nodes, size)
    for rack in set(nodes.values()):
        among = [Counter(nodes[node] for node in group)[rack] for group in groups]
        assert not among or max(among) - min(among) <= 1


@given(nodes_in_racks, sizes)
def test_the_order_in_which_nodes_came_does_not_matter(nodes, size):
    assert place_groups(nodes, size) == place_groups(dict(reversed(nodes.items())), size)


@given(nodes_in_racks, sizes, st.data())
def test_a_node_that_is_replaced_leaves_the_others_together(nodes, size, data):
    groups = place_groups(nodes, size)
    lost = data.draw(st.sampled_from(sorted(nodes)))
    after = {node: rack for node, rack in nodes.items() if node != lost} | {300: data.draw(st.sampled_from("abcd"))}
    again = place_groups(after, size, groups)
    assert_groups(again, after, size)
    assert {tuple(n for n in group if n != lost) for group in groups} == {
        tuple(n for n in group if n != 300) for group in again
    }


@given(nodes_in_racks, sizes, st.data())
def test_whatever_goes_and_comes_groups_stay_groups(nodes, size, data):
    groups = place_groups(nodes, size)
    for first in (300, 400, 500):
        gone = data.draw(st.sets(st.sampled_from(sorted(nodes)), max_size=len(nodes) - 1))
        came = data.draw(st.integers(0, 8))
        nodes = {node: rack for node, rack in nodes.items() if node not in gone}
        nodes |= {first + each: "a" for each in range(came)}
        groups = place_groups(nodes, size, groups)
        assert_groups(groups, nodes, size)


def test_a_rest_makes_groups_larger():
    assert sorted(map(len, place_groups(dict.fromkeys(range(11), "a"), 4))) == [5, 6]
    assert place_groups(dict.fromkeys(range(3), "a"), 4) == ()


def test_a_group_of_two_is_refused():
    with pytest.raises(ValueError, match="at least 3 nodes are needed"):
        place_groups({0: "a", 1: "a"}, 2)
