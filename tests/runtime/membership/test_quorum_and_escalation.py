"""Who may go on without whom, and what a fault costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations
from types import SimpleNamespace
from typing import Any

import pytest

from hyperpod_ext.config.restart import RestartPolicy
from hyperpod_ext.runtime.coordinator.members import Agent, Members
from hyperpod_ext.runtime.ipc.control_messages import AgentHandshake
from hyperpod_ext.runtime.membership.actions import EscalationLevel, Fail, Fault
from hyperpod_ext.runtime.membership.escalation import Budgets, give_up, level_of, tried
from hyperpod_ext.runtime.membership.quorum import candidates, may_go_on, may_take_over, newest

BUDGETS = Budgets.of(RestartPolicy())


@pytest.mark.parametrize("count", range(1, 8))
def test_of_two_sides_that_cannot_see_each_other_one_at_most_goes_on(count: int) -> None:
    members = set(range(count))
    for side in map(set, chain.from_iterable(combinations(members, size) for size in range(count + 1))):
        if 0 in side:
            goes_on = may_go_on(members, side, 0)
            takes_over = may_take_over(members, members - side)
            assert not (goes_on and takes_over)
            assert goes_on or takes_over  # and one does, if nobody on it is lost


def test_nodes_that_are_no_members_have_no_say() -> None:
    assert may_go_on({0, 1, 2, 3}, {1}, 0)
    assert not may_go_on({0, 1, 2, 3}, {7, 8, 9}, 0)
    assert not may_take_over({0, 1, 2, 3}, {2, 3, 8, 9})


def test_a_term_counts_before_a_number_though_that_is_higher() -> None:
    assert newest([{"term": 2, "number": 1}, {"term": 1, "number": 9}])["term"] == 2


def test_the_newest_record_of_the_latest_term_is_the_one_to_go_on_with() -> None:
    job_states = [{"term": 1, "number": 9}, {"term": 2, "number": 1}, {"term": 2, "number": 3}]
    assert newest(job_states) == {"term": 2, "number": 3}
    assert candidates([2, 0, 1], 0) == [1, 2]


def handshake_of(node: int) -> AgentHandshake:
    known: dict[str, Any] = {"id": "", "pid": 1, "peer": ("", 1), "address": ("", 1), "domain": "", "job_state": None}
    return AgentHandshake(node=node, generation=1, committed=0, workers={}, exited={}, **known)


def members_of(*nodes: int, me: int = 0) -> Members:
    made = Members(me, memberships=[{me}])
    for node in nodes:
        agent: Any = Agent(SimpleNamespace(), 0.0)  # type: ignore[arg-type]
        made.enter(node, handshake_of(node), agent)
        made.number += 1
    for node in nodes:
        made.acknowledged(node, made.number)
    return made


def test_a_smaller_membership_counts_only_when_all_that_are_left_know_of_it() -> None:
    known = members_of(0, 1, 2)
    assert known.leave(1)
    assert not known.leave(2)  # 2 had not heard that 1 is out: they may be together on the other side


def test_a_membership_that_everybody_left_knows_of_is_the_new_measure() -> None:
    known = members_of(0, 1, 2)
    assert known.leave(1)
    known.number += 1
    for node in (0, 2):
        known.acknowledged(node, known.number)
    assert known.memberships == [{0, 2}]
    assert known.leave(2)


def test_nothing_is_agreed_while_a_member_may_still_come_that_knows_the_membership_before() -> None:
    known = members_of(0, 1)
    known.expected = {2: 1.0}
    known.memberships.append({0, 1, 2})
    for node in (0, 1):
        known.acknowledged(node, known.number)
    assert {0, 1, 2} in known.memberships
    known.expected = {}
    known.acknowledged(0, known.number)
    assert known.memberships == [{0, 1}]


def test_nodes_that_have_just_come_count_before_everybody_knows_of_them() -> None:
    known = members_of(0)
    for node in (1, 2):
        known.enter(node, handshake_of(node), None)  # type: ignore[arg-type]
    known.leave(1)
    assert not known.leave(2)


def raised(rank: int, step: int) -> Fault:
    return Fault(rank, f"ValueError: {step}", step, died=False, kind="exception", node=rank // 2)


def died(rank: int, step: int, node: int | None = None) -> Fault:
    return Fault(
        rank, "killed by SIGKILL (9)", step, died=True, kind="signal", node=rank // 2 if node is None else node
    )


def lost(node: int, step: int) -> Fault:
    return Fault(2 * node, "gone", step, died=True, kind="lost", node=node, node_lost=True)


def test_a_fault_escalates_when_the_budget_of_its_level_is_spent() -> None:
    assert level_of(raised(1, 5), [], BUDGETS) is EscalationLevel.IN_PROCESS
    assert level_of(raised(1, 8), [raised(1, step) for step in (5, 6, 7)], BUDGETS) is EscalationLevel.PROCESS
    assert level_of(raised(0, 8), [raised(1, step) for step in (5, 6, 7)], BUDGETS) is EscalationLevel.IN_PROCESS
    assert level_of(died(1, 8), [died(0, 5), died(1, 6)], BUDGETS) is EscalationLevel.PROCESS
    assert level_of(died(1, 8), [died(0, 5), died(1, 6), died(0, 7)], BUDGETS) is EscalationLevel.NODE
    assert level_of(died(2, 8), [died(0, 5), died(1, 6), died(0, 7)], BUDGETS) is EscalationLevel.PROCESS
    assert level_of(lost(1, 5), [], BUDGETS) is EscalationLevel.NODE


def test_a_level_is_kept_to_the_last_of_its_budget() -> None:
    budgets = replace(BUDGETS, max_in_process=3, max_on_node=2)
    assert level_of(raised(1, 7), [raised(1, step) for step in (5, 6)], budgets) is EscalationLevel.IN_PROCESS
    assert level_of(raised(1, 8), [raised(1, step) for step in (5, 6, 7)], budgets) is EscalationLevel.PROCESS
    assert level_of(died(1, 6), [died(1, 5)], budgets) is EscalationLevel.PROCESS
    assert level_of(died(1, 7), [died(1, 5), died(1, 6)], budgets) is EscalationLevel.NODE


def test_the_job_recovers_from_so_many_faults_and_ends_with_the_next() -> None:
    budgets = replace(BUDGETS, max_restarts=2)
    assert give_up(raised(0, 9), [raised(1, 5)], budgets) is None
    failure = give_up(raised(0, 9), [raised(1, 5), raised(2, 7)], budgets)
    assert isinstance(failure, Fail)
    assert "this was fault 3, and the limit is 2" in failure.message


def test_faults_that_come_too_often_end_the_job_and_old_age_does_not() -> None:
    budgets = Budgets(1000, max_restarts_in_window=2, window_s=3600.0)
    monthly = [replace(died(day % 4, step=1000 * day), at=day * 86400.0) for day in range(60)]
    assert give_up(monthly[-1], monthly[:-1], budgets) is None
    quick = [replace(died(number, step=1000 * number), at=60.0 * number) for number in range(3)]
    assert give_up(quick[1], quick[:1], budgets) is None
    failure = give_up(quick[2], quick[:2], budgets)
    assert failure is not None
    assert "this was fault 3 within 3600 s, and the limit is 2" in failure.message
    assert "restart.max_restarts_in_window" in failure.hint


def test_a_rank_that_dies_at_one_step_each_time_ends_the_job_and_its_neighbours_do_not_count() -> None:
    assert give_up(died(1, 5), [died(1, 5), died(0, 5)], BUDGETS) is None
    assert give_up(died(1, 5), [died(1, 4), died(1, 5)], BUDGETS) is None
    failure = give_up(died(1, 5), [died(1, 5), died(1, 5)], BUDGETS)
    assert isinstance(failure, Fail)
    assert "3 times in a row" in failure.message


def test_faults_add_up_while_each_is_near_the_next() -> None:
    budgets = replace(BUDGETS, max_in_process=3, calm_steps=20)
    assert level_of(raised(1, 60), [raised(1, step) for step in (15, 30, 45)], budgets) is EscalationLevel.PROCESS
    assert level_of(raised(1, 65), [raised(1, step) for step in (15, 30, 45)], budgets) is EscalationLevel.IN_PROCESS


def test_faults_far_apart_do_not_add_up() -> None:
    assert (
        level_of(raised(1, 400), [raised(1, step) for step in range(0, 400, 20)], BUDGETS) is EscalationLevel.IN_PROCESS
    )
    assert level_of(died(1, 400), [died(1, step) for step in range(0, 400, 20)], BUDGETS) is EscalationLevel.PROCESS


def test_too_many_lost_nodes_end_the_job_and_the_error_says_what_was_tried() -> None:
    earlier = [lost(1, 5), lost(2, 6), lost(3, 7)]
    earlier = [
        replace(raised(0, 3), level=EscalationLevel.IN_PROCESS),
        *(replace(fault, level=EscalationLevel.NODE) for fault in earlier),
    ]
    failure = give_up(lost(4, 9), earlier, BUDGETS)
    assert isinstance(failure, Fail)
    assert "node 4 is lost at step 9: gone; this was node loss 4, and the limit is 3." in failure.message
    assert "Tried before: 1 x in process, 3 x node." in failure.message
    assert "durable" in failure.hint
    assert give_up(lost(4, 9), earlier[:-1], BUDGETS) is None
    assert tried([]) == ""


def hung(rank: int, step: int, phase: str = "forward", seconds: float = 2.1) -> Fault:
    cause = f"hung in {phase} of step {step}, no progress for {seconds} s"
    return Fault(rank, cause, step, died=True, node=rank // 2, kind="hang", place=phase)


def stuck(rank: int, step: int) -> Fault:
    cause = f"did not leave generation {step} within 1 s of a fault on another rank (train.py:7)"
    return Fault(rank, cause, step, died=True, node=rank // 2, kind="stuck")


def test_the_same_hang_three_times_ends_the_job_at_whatever_step_and_however_long_it_took() -> None:
    failure = give_up(hung(1, 9, seconds=2.3), [hung(1, 5), hung(1, 7, seconds=2.2)], BUDGETS)
    assert isinstance(failure, Fail)
    told = "rank 1 (node 0) at step 9: hung in forward of step 9, no progress for 2.3 s; 3 times in a row"
    assert failure.message == told
    silent = replace(hung(1, 5), kind="heartbeat", cause="no heartbeat for 60.0 s in forward of step 5")
    assert give_up(hung(1, 9), [silent, hung(3, 7), hung(1, 7)], BUDGETS) is not None
    assert give_up(hung(1, 9), [hung(1, 5), hung(1, 7, "backward")], BUDGETS) is None
    assert give_up(hung(1, 9), [hung(1, 5), hung(3, 7)], BUDGETS) is None
    assert give_up(hung(1, 400), [hung(1, 5), hung(1, 6)], BUDGETS) is None


def test_ranks_that_do_not_leave_are_no_faults_of_their_own() -> None:
    stalled = [replace(hung(0, step), died=False, kind="stalled") for step in (5, 6, 7)]
    earlier = [stalled[0], *(stuck(rank, 5) for rank in range(4)), stalled[1], *(stuck(rank, 6) for rank in range(4))]
    assert give_up(stuck(3, 6), earlier, Budgets(max_restarts=0)) is None
    assert level_of(stuck(1, 6), earlier, BUDGETS) is EscalationLevel.PROCESS
    assert level_of(died(1, 6), earlier, BUDGETS) is EscalationLevel.PROCESS
    assert give_up(raised(1, 7), earlier, Budgets(max_restarts=3)) is None
    failure = give_up(stalled[2], earlier, BUDGETS)
    assert isinstance(failure, Fail)
    assert "at step 7: hung in forward of step 7, no progress for 2.1 s; 3 times in a row." in failure.message
    assert failure.message.endswith("3 did not leave generation 6 within 1 s of a fault on another rank (train.py:7).")


def test_an_exception_is_known_by_its_line_not_by_its_words() -> None:
    one = replace(raised(1, 5), cause="ValueError: 3.14 (a.py:7)", kind="exception", place="ValueError at a.py:7")
    again = replace(one, rank=3, cause="ValueError: 2.72 (a.py:7)")
    assert "2 times in a row" in str(give_up(again, [one], BUDGETS))
    assert give_up(replace(again, place="ValueError at a.py:9"), [one], BUDGETS) is None
    assert give_up(replace(again, step=6), [one], BUDGETS) is None
