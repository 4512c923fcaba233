from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext.runtime.membership.candidates import choose_candidates
from hyperpod_ext.runtime.membership.job_state_changes import chained, changed, changes

STATES: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.sampled_from("abc"),
    st.recursive(
        st.integers(0, 2) | st.lists(st.integers(0, 1), max_size=2),
        lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)


@given(STATES, STATES)
def test_changes_make_of_one_state_the_other_and_leave_the_first_as_it_was(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    text = json.dumps(before)
    over_the_wire = json.loads(json.dumps(changes(before, after)))
    assert changed(before, over_the_wire) == after
    assert json.dumps(before) == text
    assert changes(before, json.loads(json.dumps(before))) == []


def test_one_node_that_is_lost_is_two_short_changes_whatever_the_size_of_the_job() -> None:
    before = {"members": {str(node): {"id": str(node)} for node in range(1000)}, "nodes": {"7": 7, "8": 8}}
    after = {"members": {key: its for key, its in before["members"].items() if key != "7"}, "nodes": {"7": 9, "8": 8}}
    assert sorted(changes(before, after)) == [(("members", "7"),), (("nodes", "7"), 9)]


def test_a_change_to_what_is_not_there_is_refused() -> None:
    for made in ([(("a", "b"), 1)], [(("b",),)]):
        with pytest.raises(KeyError):
            changed({"a": 1}, made)


def test_who_has_missed_a_change_has_another_digest() -> None:
    one, two = changes({}, {"a": 1}), changes({"a": 1}, {"a": 2})
    assert chained(chained("", one), two) != chained("", two)
    assert chained("", one) == chained("", json.loads(json.dumps(one))), "lists and tuples are the same on the wire"


def test_all_of_a_small_job_are_candidates_and_of_a_large_one_a_few_of_different_domains() -> None:
    assert choose_candidates(set(), dict.fromkeys(range(5), ""), 0) == {0, 1, 2, 3, 4}
    racks = {node: f"rack {node // 100}" for node in range(800)}
    chosen = choose_candidates(set(), racks, 0, most=8)
    assert len(chosen - {0}) == 8
    assert {racks[node] for node in chosen} == set(racks.values())
    assert choose_candidates(chosen, {node: its for node, its in racks.items() if node != 1}, 0, most=8) >= chosen - {1}
