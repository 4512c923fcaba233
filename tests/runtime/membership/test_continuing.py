"""Numbers of the ranks that are left, and of those that come back (`restart.policy: continue`)."""

from __future__ import annotations

import random

import pytest

from hyperpod_ext.runtime.membership.continuing import refill, without
from hyperpod_ext.runtime.membership.node_states import NodeState, NodeStates


def test_high_ranks_take_the_numbers_of_those_that_are_lost():
    left = without({0: 0, 1: 0, 2: 1, 3: 1}, [1])
    assert left.moved == {0: 0, 2: 2, 3: 1}
    assert left.after == {0: 0, 1: 1, 2: 1}
    assert without({0: 0, 1: 0, 2: 1, 3: 1}, [0, 1]).moved == {2: 0, 3: 1}
    assert without({0: 0, 1: 1, 2: 2}, [2]).moved == {0: 0, 1: 1}, "nobody else changes"


@pytest.mark.parametrize("seed", range(60))
def test_numbers_have_no_gaps_and_a_node_can_tell_joining_processes_from_its_others(seed: int):
    rng = random.Random(seed)
    nodes, each = rng.randint(1, 4), rng.randint(1, 4)
    if nodes * each == 1:
        each = 2
    whole = {rank: rank // each for rank in range(nodes * each)}
    now, places, states = dict(whole), list(range(nodes)), NodeStates(range(nodes), range(nodes, nodes + 2))
    for _ in range(4):
        lost = rng.sample(sorted(now), rng.randint(0, len(now) - 1))
        kept = without(now, lost)
        assert sorted(kept.after) == list(range(len(now) - len(lost)))
        assert {kept.moved[rank]: now[rank] for rank in kept.moved} == dict(kept.after)
        now = dict(kept.after)
        if rng.random() < 0.3 and (idle := [node for node in places if node not in now.values()]):
            states.lose(rng.choice(idle))
        back = refill(now, places, states, each)
        if back is None:
            assert len(now) == len(whole) or not states.spares
            continue
        assert sorted(back.after) == list(range(len(back.after)))
        assert {back.moved[rank]: now[rank] for rank in now} | dict(back.joining) == dict(back.after)
        for rank, node in back.joining.items():
            assert now.get(rank) != node, "that number is another process's of this node"
            if states[node] is NodeState.SPARE:
                states.set_state(node, NodeState.MEMBER)
        now, places = dict(back.after), list(back.places)
        if back.complete:
            assert now == {rank: places[rank // each] for rank in whole}, "each node has a block again"
        else:
            assert len(now) < len(whole)
