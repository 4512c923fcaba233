"""`restart.policy: continue`, message by message: the others go on, and lost ranks come back."""

from __future__ import annotations

import json
import random

import pytest
from made_membership import begin, kinds, logged, stop

from hyperpod_ext.runtime.membership import actions as m
from hyperpod_ext.runtime.membership.continuing import refill, without
from hyperpod_ext.runtime.membership.escalation import Budgets
from hyperpod_ext.runtime.membership.membership import Membership
from hyperpod_ext.runtime.membership.node_states import NodeState, NodeStates

BUDGETS = Budgets(1000, max_node_losses=100, quarantine_after=100)


def continuing(nodes: int, each: int, spares: int = 0, *, began: bool = True) -> Membership:
    made = Membership({rank: rank // each for rank in range(nodes * each)}, BUDGETS, reserve=spares, continues=True)
    made.begin_with_spares(range(nodes, nodes + spares))
    if began:
        begin(made, live=False)
    return made


def death(membership: Membership, rank: int, step: int | None = None) -> m.Fault:
    at = membership.committed + 1 if step is None else step
    return m.Fault(rank, "killed by SIGKILL (9)", at, died=True, kind="signal")


def kill(membership: Membership, rank: int, step: int | None = None) -> list[m.Action]:
    return membership.fault(death(membership, rank, step), membership.generation)


def come_back(membership: Membership, commands: list[m.Action]) -> list[m.Action]:
    """Those that were lost are started, all stop, and go on with them."""
    joining = [one.rank for one in commands if isinstance(one, m.Prepare)]
    ready = [action for rank in joining for action in membership.prepared(rank)]
    return stop(membership, ready)


# --- numbers ----------------------------------------------------------------------------------------


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


# --- message by message -----------------------------------------------------------------------------


def test_the_others_go_on_at_once_and_the_lost_rank_joins_between_two_steps():
    membership = continuing(1, 4)
    commands = kill(membership, 1)
    assert kinds(commands) == [m.Abort], "nobody waits for a replacement"
    world = logged(commands, "world")
    assert (world["cause"], world["world_size"], world["moved"]) == ("continued", 3, {"0": 0, "2": 2, "3": 1})
    assert membership.full_size == 4
    commands = begin(membership)
    assert kinds(commands) == [m.Begin, m.Go, m.Release, m.Prepare], "while the others train, it is started"
    assert next(one for one in commands if isinstance(one, m.Prepare)) == m.Prepare(3, 0, 4)
    commands = come_back(membership, commands)
    assert (logged(commands, "world")["cause"], membership.nodes) == ("rejoined", dict.fromkeys(range(4), 0))
    assert kinds(begin(membership)) == [m.Begin, m.Go, m.Release]
    assert not membership.continuing.is_short


def test_before_anybody_has_trained_a_lost_rank_is_waited_for():
    assert m.Replace in kinds(kill(continuing(1, 4, began=False), 1))


def test_the_last_rank_is_waited_for_and_then_the_others_come_back():
    membership = continuing(1, 2)
    kill(membership, 0)
    begin(membership)
    assert kinds(kill(membership, 0)) == [m.EndPrepared, m.Abort, m.Replace]
    commands = begin(membership)
    assert m.Prepare in kinds(commands)
    come_back(membership, commands)
    assert len(membership.nodes) == 2


def test_a_second_rank_lost_before_the_others_have_gone_on():
    membership = continuing(2, 2)
    kill(membership, 0)
    commands = kill(membership, 2)
    assert logged(commands, "world")["world_size"] == 2
    commands = come_back(membership, begin(membership))
    assert logged(commands, "world")["world_size"] == 4
    assert membership.nodes == {0: 0, 1: 0, 2: 1, 3: 1}


def test_three_that_die_at_once_are_not_one_that_dies_three_times():
    """Each death gives the next one the number of the last: 1, then the former 3, then the former 2."""
    membership = continuing(2, 2)
    generation = membership.generation
    assert m.Fail not in kinds(kill(membership, 1))
    for old in (3, 2):
        rank = membership.renumbering.rank_now(old, generation)
        assert rank == 1
        assert m.Fail not in kinds(membership.fault(death(membership, rank), generation))
    assert membership.nodes == {0: 0}
    assert [fault.follows for fault in membership.faults] == [False, True, True]
    come_back(membership, begin(membership))
    assert len(membership.nodes) == 4


def test_a_rank_lost_while_the_replacement_of_another_joins():
    membership = continuing(2, 2)
    kill(membership, 0)
    commands = begin(membership)
    (asked,) = [one for one in membership.prepared(_joining(commands)) if isinstance(one, m.AskStop)]
    commands = kill(membership, 1)
    assert kinds(commands) == [m.WithdrawStop, m.EndPrepared, m.Abort]
    assert membership.stopped(0, asked.number) == []
    commands = come_back(membership, begin(membership))
    assert logged(commands, "world")["world_size"] == 4


def test_an_exception_costs_no_rank():
    membership = continuing(1, 4)
    raised = m.Fault(1, "ValueError: no", 8, died=False, kind="exception")
    assert kinds(membership.fault(raised, membership.generation)) == [m.Abort]
    assert len(membership.nodes) == 4


def test_ranks_with_shards_are_waited_for():
    membership = continuing(1, 4)
    membership.sharing = "shard"
    assert m.Replace in kinds(kill(membership, 1))


def test_a_replacement_that_never_starts_leaves_the_others_going_until_another_fault():
    membership = continuing(1, 4)
    kill(membership, 1)
    commands = begin(membership)
    for _ in range(2):
        assert m.Prepare in kinds(membership.not_prepared(_joining(commands), "exit code 1"))
    commands = membership.not_prepared(_joining(commands), "exit code 1")
    assert kinds(commands) == [m.EndPrepared]
    assert logged(commands, "rejoin_given_up") == {
        "missing": 1,
        "why": "rank 3 of the new world does not start: exit code 1",
    }
    assert membership.reconcile() == []
    kill(membership, 0)
    assert m.Prepare in kinds(begin(membership))


# --- nodes ------------------------------------------------------------------------------------------


def test_a_lost_node_is_gone_on_without_and_a_spare_brings_its_ranks_back():
    membership = continuing(2, 2, spares=1)
    commands = membership.node_lost(0, "gone")
    assert kinds(commands) == [m.Abort]
    assert membership.nodes == {0: 1, 1: 1}
    commands = begin(membership)
    assert [(one.rank, one.node) for one in commands if isinstance(one, m.Prepare)] == [(0, 2), (1, 2)]
    come_back(membership, commands)
    assert membership.nodes == {0: 2, 1: 2, 2: 1, 3: 1}
    assert membership.spares_used == 1
    assert membership.states[2] is NodeState.MEMBER


def test_without_a_spare_the_others_go_on_until_a_node_comes():
    membership = continuing(3, 1)
    membership.node_lost(1, "gone")
    assert m.Prepare not in kinds(begin(membership))
    kill(membership, 0)  # a process meanwhile comes back by itself
    commands = come_back(membership, begin(membership))
    assert logged(commands, "world")["world_size"] == 2
    assert membership.continuing.is_short
    begin(membership)
    commands = membership.node_came(1)
    assert m.Prepare in kinds(commands)
    come_back(membership, commands)
    assert membership.nodes == {0: 0, 1: 1, 2: 2}


def test_a_spare_lost_on_its_way_in_is_replaced_by_the_next():
    membership = continuing(2, 1, spares=2)
    membership.node_lost(1, "gone")
    begin(membership)
    assert membership.states[2] is NodeState.JOINING
    commands = membership.node_lost(2, "gone, too")
    assert [(one.rank, one.node) for one in commands if isinstance(one, m.Prepare)] == [(1, 3)]


def test_the_node_of_a_lost_rank_is_lost_while_its_replacement_starts():
    membership = continuing(3, 1, spares=1)
    kill(membership, 1)
    commands = begin(membership)
    assert [(one.rank, one.node) for one in commands if isinstance(one, m.Prepare)] == [(1, 1)]
    commands = membership.node_lost(1, "gone")
    assert [(one.rank, one.node) for one in commands if isinstance(one, m.Prepare)] == [(1, 3)]
    assert not [one for one in commands if isinstance(one, m.Abort)], "the others train on"


def test_the_last_node_is_replaced_and_the_lost_ranks_of_the_others_come_back():
    membership = continuing(2, 1, spares=1)
    kill(membership, 0)  # on a node that is there
    begin(membership)
    commands = membership.node_lost(1, "gone")
    assert m.TakeOver in kinds(commands)
    commands = come_back(membership, begin(membership))
    assert membership.nodes == {0: 0, 1: 2}


def test_a_node_whose_processes_die_again_and_again_gives_its_ranks_to_a_spare():
    budgets = Budgets(100, max_on_node=1)
    membership = Membership({0: 0, 1: 0, 2: 1, 3: 1}, budgets, reserve=1, continues=True)
    membership.begin_with_spares([2])
    begin(membership, live=False)
    come_back_after = kill(membership, 1)
    assert m.Decommission not in kinds(come_back_after)
    come_back(membership, begin(membership))
    begin(membership)
    commands = kill(membership, 0, step=9)
    assert kinds(commands) == [m.Abort, m.Decommission]
    membership.decommissioned(0, [])
    come_back(membership, begin(membership))
    assert set(membership.nodes.values()) == {1, 2}


def test_a_node_that_is_to_end_leaves_and_a_spare_brings_its_ranks_back():
    membership = continuing(3, 2, spares=1)
    commands = membership.leave(1)
    assert kinds(commands) == [m.Abort, m.Decommission]
    assert logged(commands, "node_leaves") == {"node": 1}
    assert (sorted(membership.nodes.values()), membership.faults) == ([0, 0, 2, 2], [])
    assert membership.decommissioned(1, []) == []
    commands = begin(membership)
    come_back(membership, commands)
    assert (sorted(membership.nodes.values()), membership.states.losses) == ([0, 0, 2, 2, 3, 3], {})
    assert membership.states[1] is NodeState.RELEASED


def test_the_last_node_that_is_to_end_cancels_the_job():
    membership = continuing(2, 1)
    assert kinds(membership.leave(0)) == [m.Abort, m.Decommission]
    membership.decommissioned(0, [])
    begin(membership)
    assert m.Cancel in kinds(membership.leave(1))


def test_whoever_stops_all_for_a_fault_stops_nobody_while_ranks_are_missing():
    membership = continuing(2, 2)
    assert kinds(membership.hold(0, for_fault=True)) == [m.Abort], "nothing is missing yet"
    membership.resume(0, 2)
    begin(membership)
    membership.node_lost(1, "its connection ended")
    assert membership.hold(0, for_fault=True) == []
    assert m.Go in kinds(begin(membership))
    assert membership.resume(0, 2) == []
    assert kinds(membership.hold(0)) == [m.Abort], "another reason counts all the same"


def test_no_order_to_move_is_taken_while_ranks_are_missing():
    membership = continuing(2, 2, spares=1)
    kill(membership, 0)
    assert "missing" in logged(membership.move(1, "a"), "resize_refused")["why"]


def test_another_coordinator_knows_which_ranks_are_missing():
    membership = continuing(3, 1, spares=1)
    kill(membership, 1)
    begin(membership)
    known = json.loads(json.dumps(membership.to_json()))
    revived, _ = Membership.revived(
        known, BUDGETS, durable=False, generation=membership.generation, committed=7, reserve=1, continues=True
    )
    assert revived.full_size == 3
    assert revived.states[1] is NodeState.MEMBER
    commands = come_back(revived, begin(revived))
    assert logged(commands, "world")["cause"] == "rejoined"
    assert revived.nodes == {0: 0, 1: 1, 2: 2}


def test_healthy_ranks_wait_where_nothing_is_said():
    membership = Membership(dict.fromkeys(range(4), 0), BUDGETS)
    begin(membership, live=False)
    assert kinds(kill(membership, 1)) == [m.Abort, m.Replace]
    assert "places" not in membership.to_json()


def _joining(commands: list[m.Action]) -> int:
    (rank,) = {one.rank for one in commands if isinstance(one, m.Prepare)}
    return rank


def test_many_faults_at_any_moment_leave_a_world_without_gaps():
    for seed in range(150):
        _shake(random.Random(seed))


def _shake(rng: random.Random) -> None:
    nodes, each, spares = rng.randint(1, 3), rng.randint(1, 3), rng.randint(0, 2)
    if nodes * each == 1:
        return
    membership = continuing(nodes, each, spares)
    absent: set[int] = set()
    for moment in range(25):
        ranks = sorted(rank for rank in membership.nodes if rank not in membership.unassigned)
        match rng.choice(["kill", "kill", "lose", "leave", "come", "ready", "go", "die joining"]):
            case "kill" if ranks:
                kill(membership, rng.choice(ranks), step=100 * moment)
            case "lose" if len(there := membership.states.those(*NodeState) - absent) > 1:
                absent.add(node := rng.choice(sorted(there)))
                membership.node_lost(node, "gone")
            case "leave" if len(members := sorted({membership.nodes[rank] for rank in ranks})) > 1:
                if m.Decommission in kinds(membership.leave(node := rng.choice(members))):
                    membership.decommissioned(node, [])
            case "come" if absent:
                absent.discard(node := rng.choice(sorted(absent)))
                membership.node_came(node)
            case "go" if membership.phase is m.JobPhase.FORMING and not membership.unassigned:
                if not membership.states.those(NodeState.DECOMMISSIONED):
                    begin(membership)
            case "ready" if (change := membership.rescaling.change) is not None:
                come_back(membership, [m.Prepare(rank, node, 0) for rank, node in change.joining.items()])
            case "die joining" if (change := membership.rescaling.change) is not None:
                membership.not_prepared(min(change.joining), "exit code 1")
        assert sorted(membership.nodes) == list(range(len(membership.nodes)))
        assert membership.full_size == nodes * each
        if (change := membership.rescaling.change) is not None:
            assert not set(change.joining.items()) & set(membership.nodes.items())
            assert change.joining.keys() <= change.to.after.keys()
    for node in sorted(absent):
        membership.node_came(node)
    for _ in range(4):
        for node in sorted(membership.states.those(NodeState.RELEASED)):  # its agent has ended, and another begins
            membership.node_came(node)
        for node in membership.states.those(NodeState.DECOMMISSIONED):
            membership.decommissioned(node, [])
        if membership.phase is m.JobPhase.FORMING:
            begin(membership)
        membership.continuing.gave_up = False
        membership.reconcile()
        if (change := membership.rescaling.change) is not None:
            come_back(membership, [m.Prepare(rank, node, 0) for rank, node in change.joining.items()])
    assert len(membership.nodes) == nodes * each
    blocks = [{membership.nodes[rank] for rank in range(b * each, (b + 1) * each)} for b in range(nodes)]
    assert all(len(block) == 1 for block in blocks)
    assert not membership.continuing.is_short
