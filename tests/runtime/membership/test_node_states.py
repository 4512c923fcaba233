"""What a node may become, from what it is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext.runtime.membership.node_states import TRANSITIONS, NodeState, NodeStates, TransitionError, Why

S = NodeState


def at(state: NodeState) -> NodeStates:
    """Node 7 in this state, by the shortest way there."""
    ways: dict[NodeState, list[NodeState]] = {S.ABSENT: []}
    while state not in ways:
        for (before, way), after in itertools.product(list(ways.items()), NodeState):
            if after in TRANSITIONS[before]:
                ways.setdefault(after, [*way, after])
    states = NodeStates()
    for step in ways[state]:
        states.set_state(7, step, Why.RESIZED if step is S.DECOMMISSIONED else None)
    return states


@pytest.mark.parametrize("before", NodeState)
@pytest.mark.parametrize("after", NodeState)
def test_a_node_becomes_what_the_table_allows_and_nothing_else(before: NodeState, after: NodeState) -> None:
    states = at(before)
    if after in TRANSITIONS[before]:
        states.set_state(7, after)
        assert states[7] is after
        return
    with pytest.raises(TransitionError, match=f"node 7 is {before.value}, and cannot become {after.value}"):
        states.set_state(7, after)
    assert states[7] is before


@pytest.mark.parametrize("state", NodeState)
def test_every_state_can_be_reached_and_a_node_is_lost_from_any(state: NodeState) -> None:
    states = at(state)
    assert states.lose(7) is state
    assert states[7] is S.ABSENT
    assert states.why(7) is None


def test_a_node_that_asks_to_leave_is_remembered_until_it_is_released() -> None:
    states = NodeStates(members=[7])
    states.ask_to_leave(7)
    assert (states[7], states.asked) == (S.DEPARTING, {7})
    states.set_state(7, S.DECOMMISSIONED, Why.ASKED)
    states.set_state(7, S.RETAINED)
    assert (states.going, states.asked) == ({7}, {7})
    states.set_state(7, S.RELEASED)
    assert (states.going, states.asked) == (set(), set())


def test_a_node_that_fails_serves_its_memory_on() -> None:
    states = NodeStates(members=[7])
    states.set_state(7, S.DECOMMISSIONED, Why.FAILED)
    states.set_state(7, S.RETAINED)
    assert states.going == set()
    states.ask_to_leave(7)
    assert states.going == {7}


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(NodeState), st.none() | st.sampled_from(Why))))
def test_a_refused_change_changes_nothing(changes: list[tuple[int, NodeState, Why | None]]) -> None:
    states = NodeStates(members=[0, 1], spares=[2])
    for node, state, why in changes:
        before = {each: (states[each], states.why(each)) for each in range(4)}
        try:
            states.set_state(node, state, why)
        except TransitionError:
            assert {each: (states[each], states.why(each)) for each in range(4)} == before
        assert set().union(*(states.those(each) for each in NodeState)) >= {0, 1, 2}
        assert states.asked <= states.those(S.DEPARTING, S.DECOMMISSIONED, S.RETAINED, S.MEMBER, S.JOINING)
