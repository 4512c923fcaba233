"""Another number of nodes, message by message."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from made_membership import LIVE_STEP, begin, kinds, logged, stop

from hyperpod_ext.runtime.membership import actions as m
from hyperpod_ext.runtime.membership.escalation import Budgets
from hyperpod_ext.runtime.membership.membership import Membership
from hyperpod_ext.runtime.membership.node_states import NodeState
from hyperpod_ext.runtime.membership.rank_assignment import Scale
from hyperpod_ext.runtime.snapshot.select import Offer

BUDGETS = Budgets(10)


def elastic(
    nodes: int = 2, each: int = 2, sizes: tuple[int, ...] = (1, 2, 3, 4), budgets: Budgets = BUDGETS
) -> Membership:
    ranks = {rank: rank // each for rank in range(nodes * each)}
    made = Membership(ranks, budgets, scale=Scale(sizes, each))
    begin(made, live=False)
    return made


def test_to_shrink_all_stop_after_one_step_and_those_who_stay_keep_their_ranks():
    membership = elastic(3)
    commands = membership.resize(2, "a")
    assert kinds(commands) == [m.AskStop]
    commands = stop(membership, commands)
    assert kinds(commands) == [m.Abort, m.Decommission]
    assert membership.nodes == {0: 0, 1: 0, 2: 1, 3: 1}
    assert logged(commands, "world")["moved"] == {"0": 0, "1": 1, "2": 2, "3": 3}
    assert membership.generation == 2
    membership.decommissioned(2, [])
    assert m.Release((2,)) in begin(membership)


def test_to_grow_joining_node_are_ready_before_anybody_is_asked_to_stop():
    membership = elastic(2)
    assert kinds(membership.resize(3, "a")) == [m.WantNodes]
    commands = membership.node_came(2)
    assert [c for c in commands if isinstance(c, m.Prepare)] == [m.Prepare(4, 2, 6), m.Prepare(5, 2, 6)]
    assert kinds(membership.prepared(4)) == []
    commands = membership.prepared(5)
    assert kinds(commands) == [m.AskStop]
    assert kinds(stop(membership, commands)) == [m.Abort]
    assert membership.nodes[5] == 2
    begin(membership)
    assert membership.rescaling.wanted == membership.size == 3


def test_a_rank_that_is_past_the_step_makes_it_a_later_one_and_nobody_stops_before_all_can():
    membership = elastic(2, 1)
    membership.resize(1, "a")
    first = membership.rescaling.change.stop.number
    assert membership.stop_answered(0, first, True, 9, False) == []
    assert membership.stopped(0, first) == []
    (asked,) = membership.stop_answered(1, first, False, 12, False)
    assert isinstance(asked, m.AskStop)
    assert asked.step > 12
    assert membership.stop_answered(0, first, True, 9, False) == []  # of the question before


def test_who_stood_before_all_had_agreed_is_waited_for_again():
    membership = elastic(2, 1)
    membership.resize(1, "a")
    number = membership.rescaling.change.stop.number
    assert membership.stopped(0, number) == []
    membership.stop_answered(0, number, True, 8, False)
    assert membership.stop_answered(1, number, True, 8, False) == [m.StopAt(number)]
    assert membership.stopped(1, number) == []
    assert m.Abort in kinds(membership.stopped(0, number))


def test_a_node_that_leaves_takes_its_ranks_to_the_last_one():
    membership = elastic(3, 1)
    commands = membership.leave(1)
    commands = stop(membership, commands)
    assert membership.nodes == {0: 0, 1: 2}
    assert membership.renumbering.moves == {2: {0: 0, 2: 1}}
    assert m.Decommission(1) in commands
    membership.decommissioned(1, [])
    assert m.Release((1,)) in begin(membership)


def test_when_too_few_would_stay_the_job_is_cancelled():
    membership = elastic(2, 1, sizes=(2,))
    assert kinds(membership.leave(1)) == [m.Cancel]


def test_a_lost_node_is_done_without_where_fewer_may_go_on():
    membership = elastic(3, 1)
    commands = membership.node_lost(0, "gone")
    assert kinds(commands) == [m.Abort]
    assert membership.nodes == {0: 2, 1: 1}
    assert membership.renumbering.rank_now(2, 1) == 0
    assert membership.renumbering.rank_now(0, 1) is None
    assert membership.renumbering.rank_now(0, 2) == 0
    begin(membership)
    assert membership.faults[0].level is m.EscalationLevel.NODE


def test_who_has_missed_several_worlds_learns_its_number_in_the_last_one():
    membership = elastic(4, 1)
    membership.node_lost(0, "gone")
    begin(membership)
    assert membership.nodes == {0: 3, 1: 1, 2: 2}
    membership.node_lost(3, "gone")
    assert membership.nodes == {0: 2, 1: 1}
    assert membership.renumbering.since(1) == {1: 1, 2: 0}
    assert membership.renumbering.since(2) == {1: 1, 2: 0}
    assert membership.renumbering.since(3) is None
    assert (membership.renumbering.rank_now(3, 1), membership.renumbering.rank_now(2, 1)) == (None, 0)


def test_who_ordered_hears_what_a_lost_node_makes_of_it():
    membership = elastic(3, 1)
    membership.resize(2, "a")
    assert logged(membership.node_lost(2, "gone"), "world")["order"] == "a"  # as was ordered
    membership = elastic(3, 1)
    membership.resize(4, "b")
    commands = membership.node_lost(2, "gone")
    assert logged(commands, "resize_refused")["order"] == "b"
    assert logged(commands, "world")["order"] == ""


def test_below_the_fewest_another_node_is_waited_for():
    membership = elastic(2, 1, sizes=(2, 3))
    assert kinds(membership.node_lost(1, "gone")) == [m.Abort, m.AwaitNode]
    assert kinds(membership.node_came(1)) == [m.TakeOver, m.Replace]


def test_two_nodes_lost_one_after_the_other_make_two_worlds():
    membership = elastic(3, 1)
    membership.node_lost(1, "gone")
    membership.join(0, None, [])
    commands = membership.node_lost(0, "gone as well")
    assert kinds(commands) == [m.Abort]
    assert membership.nodes == {0: 2}
    assert membership.generation == 3


@pytest.mark.parametrize("moment", ["asked", "agreed", "stopped"])
def test_a_death_before_the_switch_drops_the_change_and_it_is_tried_again(moment):
    membership = elastic(3, 1)
    (asked,) = [c for c in membership.resize(2, "a") if isinstance(c, m.AskStop)]
    if moment != "asked":
        for rank in membership.nodes:
            membership.stop_answered(rank, asked.number, True, 8, False)
    if moment == "stopped":
        membership.stopped(0, asked.number)
    commands = membership.fault(m.Fault(1, "killed by SIGKILL (9)", 8, died=True, kind="signal"), membership.generation)
    assert kinds(commands) == [m.WithdrawStop, m.Abort, m.Replace]
    assert membership.stopped(2, asked.number) == []
    assert membership.size == 3
    assert m.AskStop in kinds(begin(membership))  # still wanted


@pytest.mark.parametrize("node", [0, 2])
def test_a_change_is_begun_anew_when_a_node_was_cut_off_on_the_way_to_it(node: int) -> None:
    """It may have stopped, or have its workers ready, and nobody was told."""
    membership = elastic(2)
    membership.resize(3, "a")
    membership.node_came(2)
    assert kinds(membership.meet_again(node, 1)) == [m.EndPrepared, m.Abort]
    assert m.Prepare(4, 2, 6) in begin(membership)
    commands = [*membership.prepared(4), *membership.prepared(5)]
    assert kinds(stop(membership, commands)) == [m.Abort]
    assert membership.size == 3


def test_a_joining_node_that_never_starts_leaves_the_job_as_it_is():
    membership = elastic(1, 1)
    membership.resize(2, "a")
    membership.node_came(1)
    for _ in range(2):
        assert m.Prepare in kinds(membership.not_prepared(1, "exit code 1"))
    commands = membership.not_prepared(1, "exit code 1")
    assert kinds(commands) == [m.EndPrepared]
    assert "exit code 1" in logged(commands, "resize_refused")["why"]
    assert membership.rescaling.wanted == 1


def test_nodes_that_do_not_come_are_waited_for_so_long_and_then_as_many_as_there_are_go_on():
    membership = elastic(1, 1)
    membership.resize(4, "a")
    assert kinds(membership.node_came(1)) == [m.WantNodes]
    commands = membership.gave_up_waiting()
    assert m.Prepare in kinds(commands)
    assert membership.rescaling.wanted == 2


@pytest.mark.parametrize("arrived", [0, 1, 2])
def test_an_order_for_the_nodes_that_there_are_takes_back_one_to_grow(arrived: int) -> None:
    """It is answered, and nodes that came or come for the order before leave again."""
    membership = elastic(1, 1)
    membership.resize(3, "a")
    for node in range(1, 1 + arrived):
        membership.node_came(node)
    commands = membership.resize(1, "b")
    answers = {c.fields["order"]: c.fields["why"] for c in commands if getattr(c, "event", "") == "resize_refused"}
    assert answers == {"a": "another order came", "b": "the job has 1 nodes already"}
    assert m.WantNodes(1) in commands
    late = membership.node_came(1 + arrived)
    released = {node for c in [*commands, *late] if isinstance(c, m.Release) for node in c.nodes}
    assert released == set(range(1, 2 + arrived))
    assert not membership.states.spares
    assert membership.rescaling.order == ""


def test_spares_stay_when_an_order_to_grow_is_taken_back() -> None:
    membership = Membership({0: 0}, BUDGETS, scale=Scale((1, 2, 3), 1), reserve=1)
    begin(membership, live=False)
    membership.node_came(1)
    membership.resize(2, "a")
    membership.node_came(2)
    membership.resize(1, "b")
    assert membership.states.spares == {1}


def test_in_a_storm_of_orders_each_is_answered_and_the_last_one_counts() -> None:
    for seed in range(100):
        rng, answered = random.Random(seed), list[str]()
        membership = elastic(rng.randint(1, 4), 1)

        def note(commands: list[m.Action], answered: list[str] = answered) -> None:
            done = [c for c in commands if isinstance(c, m.Log) and c.event in ("resize_refused", "world")]
            answered += [c.fields["order"] for c in done if c.fields["order"]]

        def settle(membership: Membership = membership, note: Callable[[list[m.Action]], None] = note) -> None:
            while membership.rescaling.change is not None or membership.phase is m.JobPhase.FORMING:
                if (change := membership.rescaling.change) is not None:
                    for rank in list(change.joining):
                        note(membership.prepared(rank))
                    note(stop(membership, [m.AskStop(change.stop.number, 0, later=False)]))
                for node in sorted(membership.states.those(NodeState.DECOMMISSIONED)):
                    note(membership.decommissioned(node, []))
                note(begin(membership))

        for number in range(20):
            note(membership.resize(last := rng.randint(1, 4), f"{number:02}"))
            if rng.random() < 0.3:
                note(membership.node_came(max([*membership.nodes.values(), *membership.states.spares]) + 1))
            if rng.random() < 0.3:
                settle()
        while membership.size < last:
            settle()
            if membership.size < last:
                note(membership.node_came(max([*membership.nodes.values(), *membership.states.spares]) + 1))
        settle()
        assert sorted(answered) == [f"{number:02}" for number in range(20)], seed
        assert membership.size == last


@pytest.mark.parametrize(
    ("nodes", "words"),
    [(0, "cannot run on 0"), (9, "it can on 1, 2, 3, 4"), (2, "has 2 nodes already")],
)
def test_what_cannot_be_is_refused_with_what_can(nodes, words):
    assert words in logged(elastic(2).resize(nodes, "a"), "resize_refused")["why"]


def test_a_job_that_is_not_elastic_or_over_is_not_resized():
    still = Membership({0: 0}, Budgets(10))
    assert "exactly 1 nodes" in logged(still.resize(2, "a"), "resize_refused")["why"]
    membership = elastic(2, 1)
    for rank in membership.nodes:
        membership.finished(rank, 1, "digest")
    assert "over" in logged(membership.resize(1, "a"), "resize_refused")["why"]


def test_shards_that_were_cut_anew_are_kept_where_they_were_until_they_have_been_saved_anew():
    membership = elastic(3, 1)
    membership.retention.next_due = lambda step: step + 2
    membership.sharing = "shard"
    stop(membership, membership.resize(2, "a"))
    (gone,) = membership.states.going

    def held(node: int) -> list[Offer]:
        return [Offer("memory", LIVE_STEP, node, node, f"g1-s{LIVE_STEP}", sharing="shard", world_size=3)]

    membership.decommissioned(gone, held(gone))
    for rank, node in membership.nodes.items():
        membership.join(rank, None, held(node))
    for rank in membership.nodes:
        commands = membership.restore_reported(rank, 2, 1, "")
    assert m.Release not in kinds(commands)
    assert membership.release_retained(LIVE_STEP + 1) == []
    assert membership.release_retained(membership.retention.until) == [m.Release((gone,))]


@pytest.mark.parametrize("how", ["lost", "grown"])
def test_what_ranks_had_by_other_numbers_is_released_once_they_have_saved_by_the_new_ones(how: str) -> None:
    """No node goes, and each change of numbers would leave a set of slots behind."""
    membership = elastic(3, 1)
    membership.retention.next_due = lambda step: step + 2
    if how == "lost":
        membership.node_lost(0, "gone")
    else:
        membership.resize(4, "a")
        membership.node_came(3)
        stop(membership, membership.prepared(3))
    assert m.Release not in kinds(begin(membership))
    anew = membership.retention.saved_anew
    assert anew > LIVE_STEP
    assert not membership.releases_at(anew - 1)
    assert membership.release_retained(anew - 1, late=True) == []
    revived = Membership.revived(
        json.loads(json.dumps(membership.to_json())), Budgets(10), durable=False, generation=2, committed=7
    )[0]
    assert revived.retention.moved
    assert membership.releases_at(anew)
    assert membership.release_retained(anew) == [m.Release(())]
    assert membership.release_retained(anew + 1) == []


def test_another_coordinator_goes_on_with_the_same_world_and_the_same_wish():
    membership = elastic(3, 1)
    stop(membership, membership.leave(0))
    data = json.loads(json.dumps(membership.to_json()))
    revived, commands = Membership.revived(data, Budgets(10), durable=False, generation=2, committed=7)
    assert revived.nodes == membership.nodes
    assert (revived.renumbering, revived.renumbering.newest) == (membership.renumbering, 2)
    assert revived.states.those(NodeState.RETAINED) == {0}
    assert revived.rescaling.wanted == 2
    assert kinds(commands) == [m.Abort]


def test_whatever_happens_in_whatever_order_the_ranks_are_those_of_a_world_that_is_allowed():
    """Random orders, leaves, losses and arrivals: a world is never half of one."""
    worlds_seen = 0
    for seed in range(300):
        rng = random.Random(seed)
        membership = elastic(rng.randint(1, 4), rng.choice([1, 2]), budgets=Budgets(10**6, max_node_losses=10**6))
        for _ in range(30):
            each = membership.rescaling.scale.workers_per_node
            match rng.randrange(7):
                case 0:
                    membership.resize(rng.randint(1, 4), "x")
                case 1:
                    gone = set(range(6)) - set(membership.nodes.values()) - membership.states.those(
                        *NodeState
                    ) | membership.states.those(NodeState.ABSENT, NodeState.RELEASED)
                    if gone:
                        membership.node_came(min(gone))
                case 2 if membership.size > 1:
                    membership.node_lost(rng.choice(sorted(membership.nodes.values())), "gone")
                case 6 if membership.phase is m.JobPhase.RUNNING:
                    membership.move(rng.choice(sorted(membership.nodes.values())), "y")
                case 3 if membership.size > 1 and not membership.unassigned:
                    membership.leave(rng.choice(sorted(set(membership.nodes.values()))))
                case 4 if membership.rescaling.change is not None and not membership.unassigned:
                    for rank in list(membership.rescaling.change.joining):
                        membership.prepared(rank)
                    number = membership.rescaling.change.stop.number
                    for rank in list(membership.nodes):
                        membership.stop_answered(rank, number, True, 1, False)
                    for rank in list(membership.nodes):
                        membership.stopped(rank, number)
                case _ if membership.phase is m.JobPhase.FORMING and not membership.unassigned:
                    for node in sorted(membership.states.those(NodeState.DECOMMISSIONED)):
                        membership.decommissioned(node, [])
                    begin(membership)
            assert sorted(membership.nodes) == list(range(len(membership.nodes)))
            blocks = [membership.nodes[block * each] for block in range(len(membership.nodes) // each)]
            assert len(set(blocks)) == len(blocks)
            assert membership.size in membership.rescaling.scale.sizes or membership.unassigned
            assert not membership.states.spares & set(membership.nodes.values())
            moving = membership.rescaling.moving
            assert moving is None or membership.rescaling.order == "y"
            worlds_seen = max(worlds_seen, membership.renumbering.newest)
    assert worlds_seen > 3


def test_a_spare_that_has_left_and_comes_again_is_taken() -> None:
    membership = elastic(2, 1)
    membership.node_came(2)
    assert m.Release((2,)) in membership.leave(2)
    membership.node_came(2)
    assert m.Prepare in kinds(membership.resize(3, "a"))


def test_a_spare_that_is_lost_while_others_change_holds_nothing_up() -> None:
    membership = elastic(3, 1)
    membership.node_came(3)
    assert kinds(membership.resize(2, "a")) == [m.AskStop]
    assert membership.node_lost(3, "gone") == []
    assert membership.rescaling.change is not None


def test_a_node_whose_memory_is_needed_still_is_not_released_because_it_asks_to_leave() -> None:
    membership = elastic(3, 1)
    membership.sharing = "shard"
    membership.retention.next_due = lambda step: step + 2
    stop(membership, membership.resize(2, "a"))
    (gone,) = membership.states.going
    membership.decommissioned(gone, [])
    begin(membership)
    assert membership.leave(gone) == []
    assert membership.release_retained(membership.retention.until) == [m.Release((gone,))]


def test_a_node_that_was_left_out_is_a_spare_where_one_is_lacking() -> None:
    membership = elastic(3, 1)
    membership.rescaling.reserve = 1
    stop(membership, membership.resize(2, "a"))
    membership.decommissioned(2, [])
    assert m.Release not in kinds(begin(membership))
    assert membership.states.spares == {2}


def test_a_node_whose_agent_began_anew_before_it_was_missed_is_lost_first() -> None:
    membership = elastic(3, 1)
    assert kinds(membership.node_came(1)) == [m.Abort]
    assert membership.nodes == {0: 0, 1: 2}
    assert membership.states.spares == {1}


# --- the ranks of a node to a spare ---------------------------------------------------------------


def with_spare(nodes: int = 2, each: int = 2) -> Membership:
    """A job that is not elastic, and one spare."""
    ranks = {rank: rank // each for rank in range(nodes * each)}
    made = Membership(ranks, Budgets(10), reserve=1)
    made.begin_with_spares({nodes})
    begin(made, live=False)
    return made


def prepare(membership: Membership) -> list[m.Action]:
    assert membership.rescaling.change is not None
    (*_, asked) = [membership.prepared(rank) for rank in membership.rescaling.change.joining]
    return asked


def test_ranks_move_to_a_spare_between_two_steps_and_no_fault_is_counted() -> None:
    membership = with_spare()
    commands = membership.move(0, "a")
    assert logged(commands, "resize_asked")["moving"] == 0
    assert [c for c in commands if isinstance(c, m.Prepare)] == [m.Prepare(0, 2, 4), m.Prepare(1, 2, 4)]
    commands = stop(membership, prepare(membership))
    assert kinds(commands) == [m.Abort, m.Decommission]
    world = logged(commands, "world")
    assert (world["order"], world["cause"], world["of"], world["nodes"]) == ("a", "move", 2, 2)
    assert membership.nodes == {0: 2, 1: 2, 2: 1, 3: 1}
    membership.decommissioned(0, [])
    assert m.Release((0,)) in begin(membership)
    assert (membership.faults, membership.states.losses, membership.spares_left(1)) == ([], {}, False)
    assert "no spare" in logged(membership.move(1, "b"), "resize_refused")["why"]


@pytest.mark.parametrize("sharing", ["alike", "same:0,2", "shard"])
def test_what_no_other_rank_has_stays_at_the_node_that_was_moved_from_until_it_has_been_saved(sharing: str) -> None:
    """A coordinator that left at once was followed by one that began anew, and found the state nowhere."""
    membership = with_spare()
    membership.sharing = sharing
    membership.retention.next_due = lambda step: step
    membership.move(0, "a")
    stop(membership, prepare(membership))
    membership.decommissioned(0, [])
    assert m.Release not in kinds(begin(membership))
    data = json.loads(json.dumps(membership.to_json()))
    assert Membership.revived(data, Budgets(10), durable=False, generation=2, committed=7)[0].sharing == sharing
    saved = membership.committed + 1
    assert membership.release_retained(saved) == []
    assert membership.release_retained(saved + 1) == [m.Release((0,))]


def test_a_node_whose_ranks_had_what_all_that_stay_have_is_released_at_once() -> None:
    membership = elastic(3, 1)
    membership.sharing = "alike"
    stop(membership, membership.resize(2, "a"))
    (gone,) = membership.states.going
    membership.decommissioned(gone, [])
    assert m.Release((gone,)) in begin(membership)


@pytest.mark.parametrize(("node", "words"), [(2, "has no ranks"), (7, "has no ranks")])
def test_only_nodes_with_ranks_are_moved_from(node: int, words: str) -> None:
    assert words in logged(with_spare().move(node, "a"), "resize_refused")["why"]


def test_one_move_after_the_other() -> None:
    membership = with_spare()
    membership.move(0, "a")
    assert "leaving already" in logged(membership.move(0, "b"), "resize_refused")["why"]
    assert "order it again" in logged(membership.move(1, "c"), "resize_refused")["why"]
    assert membership.rescaling.order == "a"


def test_the_spare_is_lost_before_the_switch_and_the_ranks_stay_where_they_are() -> None:
    membership = with_spare()
    membership.move(0, "a")
    commands = membership.node_lost(2, "gone")
    assert kinds(commands) == [m.EndPrepared]
    assert logged(commands, "resize_refused")["order"] == "a"
    assert membership.states[0] is NodeState.MEMBER
    assert membership.states.asked == set()


def test_a_fault_before_the_switch_and_the_ranks_move_after_it() -> None:
    membership = with_spare()
    membership.move(0, "a")
    membership.fault(m.Fault(3, "killed by SIGKILL (9)", 8, died=True, kind="signal"), membership.generation)
    assert m.Prepare in kinds(begin(membership))
    assert logged(stop(membership, prepare(membership)), "world")["order"] == "a"


def test_a_node_that_is_lost_before_its_ranks_move_is_a_loss_and_the_order_is_answered() -> None:
    membership = with_spare()
    membership.move(0, "a")
    assert m.TakeOver(2, (0, 1)) in membership.node_lost(0, "gone")
    assert "a fault took" in logged(begin(membership), "resize_refused")["why"]
    assert membership.states.losses == {0: 1}


def test_another_coordinator_moves_them_as_was_ordered() -> None:
    membership = with_spare()
    membership.move(0, "a")
    data = json.loads(json.dumps(membership.to_json()))
    revived, _ = Membership.revived(data, Budgets(10), durable=False, generation=2, committed=7)
    assert m.Prepare in kinds(begin(revived))
    assert logged(stop(revived, prepare(revived)), "world")["cause"] == "move"


def test_a_node_that_is_told_to_end_while_its_ranks_are_to_move_leaves_as_well() -> None:
    membership = elastic(3, 1)
    membership.node_came(3)
    membership.move(0, "a")
    assert m.Prepare in kinds(membership.leave(0))
    commands = membership.node_lost(3, "gone")
    assert m.AskStop in kinds(commands)
    assert logged(stop(membership, commands), "world")["nodes"] == 2


def test_all_nodes_told_to_end_is_the_end_of_the_job_in_whatever_order() -> None:
    membership = elastic(1, 1, sizes=(1,))
    membership.node_came(1)
    assert m.Prepare in kinds(membership.leave(0))
    assert m.Cancel in kinds(membership.leave(1))


def test_an_order_for_other_nodes_overtakes_a_move() -> None:
    membership = elastic(3, 1)
    membership.node_came(3)
    membership.move(0, "a")
    commands = membership.resize(2, "b")
    assert logged(commands, "resize_refused")["order"] == "a"
    stop(membership, [c for c in commands if isinstance(c, m.AskStop)])
    assert membership.nodes == {0: 0, 1: 1}
