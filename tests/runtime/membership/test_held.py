"""No rank is to train until somebody outside says so, message by message."""

from __future__ import annotations

import pytest

from hyperpod_ext.runtime.membership import actions as m
from hyperpod_ext.runtime.membership.escalation import Budgets
from hyperpod_ext.runtime.membership.membership import Membership
from hyperpod_ext.runtime.membership.rank_assignment import Scale


def running(nodes: int = 2, *, elastic: bool = False) -> Membership:
    made = Membership(
        {rank: rank for rank in range(nodes)}, Budgets(10), scale=Scale((1, 2, 3), 1) if elastic else None
    )
    join(made)
    restore(made)
    return made


def join(membership: Membership) -> list[m.Action]:
    return [action for rank in list(membership.nodes) for action in membership.join(rank, None, [])]


def restore(membership: Membership) -> list[m.Action]:
    ranks = list(membership.nodes)
    done = [membership.restore_reported(rank, membership.generation, membership.attempt, "") for rank in ranks]
    assert membership.phase is m.JobPhase.RUNNING
    return [action for actions in done for action in actions]


def kinds(actions: list[m.Action]) -> list[type]:
    return [type(action) for action in actions]


def test_all_leave_their_step_once_and_go_on_when_the_last_node_lets_them() -> None:
    membership = running()
    assert kinds(membership.hold(0)) == [m.Abort]
    assert membership.hold(1) == membership.hold(0) == []
    assert join(membership) == []
    assert membership.resume(0, 2) == []
    assert kinds(membership.resume(1, 2)) == [m.Begin]
    assert membership.faults == []


def test_a_node_that_lets_them_twice_or_never_held_them_changes_nothing() -> None:
    membership = running()
    membership.hold(0)
    join(membership)
    assert membership.resume(1, 2) == []
    assert kinds(membership.resume(0, 2)) == [m.Begin]
    assert membership.resume(0, 2) == []


def test_more_nodes_are_asked_for_once_the_others_train() -> None:
    membership = running(elastic=True)
    membership.hold(0)
    membership.hold(1)
    join(membership)
    assert kinds(membership.resume(0, 3)) == [m.Log]
    assert kinds(membership.resume(1, 3)) == [m.Begin]
    assert m.WantNodes(3) in restore(membership)


@pytest.mark.parametrize("lost", [True, False])
def test_of_fewer_nodes_the_first_stay_whether_the_others_are_gone_or_held(lost: bool) -> None:
    membership = running(3, elastic=True)
    for node in range(3):
        membership.hold(node)
    for node in (1, 2) if lost else ():
        membership.node_lost(node, "its pod is deleted")
    membership.resume(0, 1)
    assert membership.nodes == {0: 0}
    for node in (1, 2):
        membership.decommissioned(node, [])
    join(membership)
    assert membership.phase is m.JobPhase.RESTORING
    assert membership.faults == []


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_of_fewer_nodes_those_stay_that_are_not_gone(lost: int) -> None:
    """The operator keeps the last pod. Of the others some have been deleted, the rest are held for good."""
    membership = running(3, elastic=True)
    for node in range(3):
        membership.hold(node)
    for node in range(lost):
        membership.node_lost(node, "its pod is deleted")
    (last,) = {2} & set(membership.nodes.values())
    membership.resume(last, 1, {0, 1})
    assert set(membership.nodes.values()) == {2}
    for node in (0, 1):
        membership.decommissioned(node, [])
    join(membership)
    assert membership.phase is m.JobPhase.RESTORING
    assert membership.faults == []


def test_a_number_of_nodes_that_the_job_cannot_have_is_refused_and_it_goes_on() -> None:
    membership = running(elastic=True)
    membership.hold(0)
    join(membership)
    refused, begins = membership.resume(0, 9)
    assert isinstance(refused, m.Log)
    assert refused.event == "resize_refused"
    assert isinstance(begins, m.Begin)


def test_a_node_that_is_lost_while_a_job_that_is_not_elastic_is_held_is_waited_for() -> None:
    membership = running()
    membership.hold(0)
    membership.hold(1)
    assert m.AwaitNode(1) in membership.node_lost(1, "silent")
    assert len(membership.faults) == 1
    assert membership.held == {0}


@pytest.mark.parametrize("elastic", [True, False])
def test_a_number_that_is_refused_sends_no_held_node_away(elastic: bool) -> None:
    membership = running(2, elastic=elastic)
    if elastic:
        membership.rescaling.scale = Scale((2, 4), 1)
    membership.hold(0)
    membership.hold(1)
    join(membership)
    (refused,) = membership.resume(0, 1)
    assert isinstance(refused, m.Log)
    assert refused.event == "resize_refused"
    assert (membership.nodes, membership.held) == ({0: 0, 1: 1}, {1})
    assert kinds(membership.resume(1, 2)) == [m.Begin]


@pytest.mark.parametrize("resumed_first", [True, False])
def test_a_spare_that_leaves_while_it_holds_the_others_holds_nobody(resumed_first: bool) -> None:
    """The operator stops all pods, deletes one that has no rank, and has the others go on."""
    membership = running(elastic=True)
    membership.node_came(2)
    for node in range(3):
        membership.hold(node)
    join(membership)
    if resumed_first:
        assert membership.resume(0, 2) == membership.resume(1, 2) == []
        assert kinds(membership.leave(2)) == [m.Release, m.Begin]
    else:
        assert kinds(membership.leave(2)) == [m.Release]
        assert membership.hold(2) == [], "it has said so before it heard that it may go"
        assert membership.resume(0, 2) == []
        assert kinds(membership.resume(1, 2)) == [m.Begin]


def test_a_node_that_is_not_in_the_job_holds_nobody() -> None:
    membership = running()
    assert membership.hold(2) == []
    membership.node_came(2)
    assert kinds(membership.leave(2)) == [m.Release]
    assert membership.hold(2) == []
    assert membership.phase is m.JobPhase.RUNNING
