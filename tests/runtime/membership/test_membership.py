"""The membership under ordered and disordered messages."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_membership import begin

from hyperpod_ext.runtime.membership.actions import (
    Abort,
    Action,
    AskDurable,
    AwaitNode,
    Begin,
    Decommission,
    EscalationLevel,
    Fail,
    Fault,
    Finish,
    Go,
    JobPhase,
    Replace,
    Restore,
    TakeOver,
)
from hyperpod_ext.runtime.membership.escalation import Budgets
from hyperpod_ext.runtime.membership.membership import Membership
from hyperpod_ext.runtime.membership.node_states import NodeStates
from hyperpod_ext.runtime.snapshot.manifest import save_id_of
from hyperpod_ext.runtime.snapshot.select import Offer

NODES = {0: 0, 1: 0, 2: 1, 3: 1}


def fresh(max_restarts: int = 10) -> Membership:
    return Membership(NODES, Budgets(max_restarts))


def offer(rank: int, step: int, generation: int = 1) -> Offer:
    return Offer("live", step, rank, NODES[rank], f"g{generation}-s{step}")


def memory(rank: int, step: int) -> Offer:
    """A rank's own part in its node's memory, that no other rank's replaces."""
    return Offer("memory", step, rank, NODES[rank], f"g1-s{step}", own_digest=f"own{rank}", sharing="shard")


def held_by(node: int, *steps: int) -> list[Offer]:
    return [memory(rank, step) for rank in NODES if NODES[rank] == node for step in steps]


def died(rank: int, step: int = 3) -> Fault:
    return Fault(rank, "killed by SIGKILL (9)", step, died=True, kind="signal")


def raised(rank: int, step: int = 3, cause: str = "ValueError: x") -> Fault:
    return Fault(rank, cause, step, died=False, kind="exception")


def start(membership: Membership, step: int | None = None) -> None:
    """Everybody joins (with live state of `step`), restores and goes."""
    for rank in NODES:
        membership.join(rank, None if step is None else offer(rank, step), [])
    for rank in NODES:
        membership.restore_reported(rank, membership.generation, membership.attempt, "")
    assert membership.phase is JobPhase.RUNNING


def kinds(commands: list[Action]) -> list[type]:
    return [type(command) for command in commands]


def test_the_first_generation_begins_when_all_are_there_and_starts_from_nothing():
    membership = fresh()
    assert [membership.join(rank, None, []) for rank in (0, 1, 2)] == [[], [], []]
    (begin,) = membership.join(3, None, [])
    assert isinstance(begin, Begin)
    assert begin.decision.step == 0
    assert {source.kind for (source,) in begin.decision.sources.values()} == {"fresh"}


def test_training_starts_only_when_every_rank_has_restored():
    membership = fresh()
    for rank in NODES:
        membership.join(rank, None, [])
    assert [membership.restore_reported(rank, 1, 1, "") for rank in (0, 1, 2)] == [[], [], []]
    assert membership.restore_reported(3, 1, 1, "") == [Go(0)]


def test_what_is_said_of_an_attempt_that_was_given_up_does_not_count_for_the_next():
    membership = fresh()
    for rank, node in NODES.items():
        membership.join(rank, None, held_by(node, 5, 6))
    (again,) = membership.restore_reported(0, 1, 1, "its bytes are damaged")
    assert isinstance(again, Restore)
    assert [membership.restore_reported(rank, 1, 1, "") for rank in NODES] == [[]] * 4
    assert membership.restore_reported(3, 1, 1, "damaged, too") == []
    assert membership.attempt == again.attempt == 2
    assert [membership.restore_reported(rank, 1, 2, "") for rank in NODES] == [[], [], [], [Go(5)]]


def test_who_began_to_load_has_no_live_state_any_more():
    membership = fresh()
    start(membership)
    membership.fault(raised(0), 1)
    for rank, node in NODES.items():
        commands = membership.join(rank, offer(rank, 5 if rank == 0 else 6), held_by(node, 4))
    (begin,) = commands
    assert isinstance(begin, Begin)
    assert begin.decision.step == 6
    (again,) = membership.restore_reported(0, 2, 1, "its bytes are damaged")
    assert isinstance(again, Restore)
    assert again.decision.step == 4  # not 5: what rank 0 had is overwritten


def test_a_death_on_the_way_out_of_an_older_generation_is_a_death():
    membership = fresh()
    start(membership)
    membership.fault(died(2), 1)
    assert membership.fault(died(3), 1) == [Replace(3)]
    assert membership.generation == 2


def test_processes_of_a_node_that_die_at_one_moment_are_one_fault_of_it():
    """A kernel that is out of memory ends all eight; it was three moments too many after the first."""
    nodes, spare = {rank: rank // 8 for rank in range(16)}, 2
    membership = Membership(nodes, Budgets(4), reserve=1)
    membership.begin_with_spares([spare])
    for moment in (1, 2, 3):
        begin(membership, live=moment > 1)
        generation, step = membership.generation, 10 * moment
        for rank in range(8):
            commands = membership.fault(died(rank, step), generation)
            assert kinds(commands)[-1] is Replace, commands
        assert sum(not fault.follows for fault in membership.faults) == moment
    begin(membership)
    assert Decommission in kinds(membership.fault(died(0, 40), membership.generation))


def test_a_process_that_dies_on_its_way_out_of_a_resize_is_a_fault_of_its_own():
    membership = Membership(NODES, Budgets(10))
    begin(membership, live=False)
    generation = membership.generation
    membership.hold(1)
    membership.fault(died(2), generation)
    assert [fault.follows for fault in membership.faults] == [False]


def test_who_finished_in_a_generation_that_was_left_has_not_finished_the_job():
    membership = fresh()
    start(membership)
    for rank in (0, 1, 2):
        assert membership.finished(rank, 1, "digest") == []
    membership.fault(raised(3), 1)
    start(membership, 3)
    assert membership.finished(3, 1, "digest") == []
    assert [membership.finished(rank, 2, "digest") for rank in NODES] == [[], [], [], [Finish()]]


def test_a_death_raises_the_generation_and_asks_for_a_replacement():
    membership = fresh()
    start(membership)
    commands = membership.fault(died(2), 1)
    assert commands == [Abort(2, 2), Replace(2)]


def test_an_exception_asks_for_no_replacement():
    membership = fresh()
    start(membership)
    assert kinds(membership.fault(raised(2), 1)) == [Abort]


def test_what_others_meet_on_their_way_out_is_no_second_fault():
    membership = fresh()
    start(membership)
    membership.fault(died(2), 1)
    assert membership.fault(raised(0), 1) == []
    assert membership.generation == 2


def test_a_second_death_while_the_generation_forms_is_replaced_without_another_abort():
    membership = fresh()
    start(membership)
    membership.fault(died(2), 1)
    membership.join(0, offer(0, 2), [])
    assert membership.fault(died(0), 2) == [Replace(0)]
    assert 0 not in membership.restoring.joined


def test_a_refused_source_is_not_tried_again():
    membership = fresh()
    start(membership)
    membership.step_committed(5)
    membership.fault(died(2), 1)
    held = [Offer("memory", 5, 2, 1, "g1-s5"), Offer("memory", 4, 2, 1, "g1-s4")]
    for rank in (0, 1, 3):
        membership.join(rank, offer(rank, 5), [])
    (begin,) = membership.join(2, None, held)
    assert isinstance(begin, Begin)
    assert begin.decision.source(2).kind == "memory"
    (again,) = membership.restore_reported(2, 2, 1, "CRC64-NVME is wrong")
    assert isinstance(again, Restore)
    assert again.decision.step == 5
    assert again.decision.source(2).kind == "live"
    assert membership.restore_reported(0, 2, 1, "") == []  # an answer to the first try


def test_when_nothing_is_left_the_job_fails_and_says_what_was_seen():
    membership = fresh()
    start(membership)
    membership.step_committed(5)
    for rank in NODES:
        membership.fault(died(rank, step=6), membership.generation)
    for rank in (0, 1, 2):
        membership.join(rank, None, [])
    (failure,) = membership.join(3, None, [])
    assert isinstance(failure, Fail)
    assert failure.code == "NoCheckpointError"
    assert "newest committed was 5" in failure.message


def test_the_same_exception_twice_at_one_step_ends_the_job():
    membership = fresh()
    start(membership)
    membership.fault(raised(1), 1)
    start(membership, step=2)
    (failure,) = membership.fault(raised(3), 2)
    assert isinstance(failure, Fail)
    assert "2 times in a row" in failure.message


def test_the_same_exception_at_a_later_step_does_not():
    membership = fresh()
    start(membership)
    membership.fault(raised(1, step=3), 1)
    start(membership, step=2)
    assert kinds(membership.fault(raised(1, step=9), 2)) == [Abort]


def test_more_faults_than_the_budget_end_the_job():
    membership = fresh(max_restarts=1)
    start(membership)
    membership.fault(died(0, step=1), 1)
    start(membership, step=0)
    (failure,) = membership.fault(died(1, step=5), 2)
    assert isinstance(failure, Fail)
    assert "recovers from 1" in failure.message


def test_another_coordinator_comes_to_the_end_of_a_failed_job_by_itself():
    """The one that has found it may be cut off, and go before it has told anybody."""
    membership = fresh(max_restarts=0)
    start(membership)
    assert kinds(membership.fault(died(0, step=1), 1)) == [Fail]
    assert not membership.to_json()["ended"]
    revived, first = Membership.revived(membership.to_json(), Budgets(0), durable=False, generation=1, committed=1)
    assert (revived.phase, kinds(first)) == (JobPhase.FORMING, [Abort])


def test_when_a_node_was_cut_off_for_a_moment_all_meet_anew_once():
    membership = fresh()
    membership.join(0, None, [])
    assert kinds(membership.meet_again(0, 1)) == [Abort]
    assert membership.meet_again(1, 1) == [], "nothing that it said of this generation can be lost"
    begin(membership)
    assert kinds(membership.meet_again(0, 2)) == [Abort], "of ranks that train, something may be lost, too"
    assert membership.meet_again(1, 2) == []
    begin(membership)
    assert membership.meet_again(2, 3) == [], "it has no ranks"
    assert membership.faults == []


@pytest.mark.parametrize("phase", [JobPhase.RESTORING, JobPhase.RUNNING])
def test_a_node_that_has_missed_the_begin_of_a_generation_has_all_meet_anew(phase):
    """It came while that formed, and so knows an older one."""
    membership = fresh()
    membership.meet_again(0, 1)
    begin(membership)
    membership.phase = phase
    assert kinds(membership.meet_again(1, 1)) == [Abort]


def test_a_rank_whose_end_was_told_to_nobody_tells_it_again():
    membership = fresh()
    start(membership)
    for rank in (0, 1, 2):
        membership.finished(rank, 1, "")
    membership.meet_again(1, 1)  # rank 3 has finished while its node was cut off
    begin(membership)
    assert [kinds(membership.finished(rank, 2, "")) for rank in range(4)] == [[], [], [], [Finish]]


def test_a_final_fault_is_not_tried_again():
    membership = fresh()
    fault = Fault(1, "ModuleNotFoundError: nope", 0, died=True, kind="exit", final=True)
    (failure,) = membership.fault(fault, 1)
    assert isinstance(failure, Fail)
    assert "rank 1 (node 0)" in failure.message


def test_a_fault_of_a_rank_that_is_done_brings_everybody_back():
    membership = fresh()
    start(membership)
    membership.finished(0, 1, "digest")
    assert kinds(membership.fault(died(3), 1)) == [Abort, Replace]
    start(membership, step=12)
    assert [membership.finished(rank, 2, "digest") for rank in (0, 1, 2)] == [[], [], []]
    assert membership.finished(3, 2, "digest") == [Finish()]


# --- durable tiers --------------------------------------------------------------------------------


def with_durable() -> Membership:
    return Membership(NODES, Budgets(10), durable=True)


def stored(step: int, generation: int = 1, world_size: int = 4) -> Offer:
    save_id = f"g{generation}-s{step}"
    return Offer(
        "durable",
        step,
        -1,
        -1,
        save_id,
        world_size=world_size,
        url="s3://b/j",
        folder=f"folder of {save_id}",
        name="s3",
    )


def join_all(membership: Membership, live_step: int | None = None, held: tuple[int, ...] = ()) -> list[Action]:
    """Every rank joins, with live state or snapshots of the generation before."""
    commands: list[Action] = []
    for rank, node in NODES.items():
        live = None if live_step is None else offer(rank, live_step, membership.generation - 1)
        commands = membership.join(rank, live, held_by(node, *held))
    return commands


def restore_all(membership: Membership) -> None:
    for rank in NODES:
        membership.restore_reported(rank, membership.generation, membership.attempt, "")
    assert membership.phase is JobPhase.RUNNING


def after_a_death(committed: int | None = None, *found: Offer) -> Membership:
    """Of a job with durable tiers that began with what was found there; rank 2 died after this step."""
    membership = with_durable()
    join_all(membership)
    membership.durable_answered([*found], 1 if found else 0, ())
    restore_all(membership)
    if committed is not None:
        membership.step_committed(committed)
    membership.fault(died(2), membership.generation)
    return membership


def begun(commands: list[Action]) -> Begin:
    (begin,) = commands
    assert isinstance(begin, Begin)
    return begin


def test_at_the_start_the_durable_tiers_are_asked_before_anything_is_decided():
    membership = with_durable()
    assert join_all(membership) == [AskDurable()]
    assert membership.phase is JobPhase.FORMING
    begin = begun(membership.durable_answered([], 0, ()))
    assert {source.kind for (source,) in begin.decision.sources.values()} == {"fresh"}


def test_a_job_without_durable_tiers_asks_nobody():
    assert kinds(join_all(fresh())) == [Begin]


def test_a_job_goes_on_from_what_an_earlier_run_left():
    membership = with_durable()
    join_all(membership)
    begin = begun(membership.durable_answered([stored(90), stored(100)], 1, ()))
    assert begin.decision.step == 100
    assert {source.name for (source,) in begin.decision.sources.values()} == {"s3"}


@pytest.mark.parametrize("seen", [1, 7])
def test_generations_follow_the_newest_that_was_ever_seen(seen):
    membership = with_durable()
    join_all(membership)
    assert begun(membership.durable_answered([stored(100, seen)], seen, ())).generation == seen + 1
    restore_all(membership)
    assert membership.fault(died(2), seen + 1)[0] == Abort(seen + 2, 2)
    join_all(membership, live_step=101)
    restore_all(membership)
    assert membership.generation == seen + 2


def test_an_answer_that_comes_before_a_replaced_rank_is_kept():
    membership = with_durable()
    join_all(membership)
    assert membership.fault(died(2), 1) == [Replace(2)]
    assert membership.durable_answered([stored(100, 3)], 3, ()) == []
    begin = begun(membership.join(2, None, []))
    assert (begin.generation, begin.decision.step) == (4, 100)


@pytest.mark.parametrize("problem", ["s3://b/j is not there", "s3://b/j/step-100: not signed with this job's secret"])
def test_a_place_that_cannot_be_read_is_never_answered_with_a_fresh_start(problem):
    membership = with_durable()
    join_all(membership)
    (failure,) = membership.durable_answered([], 0, (problem,))
    assert isinstance(failure, Fail)
    assert failure.code == "NoCheckpointError"
    assert problem in failure.message
    assert "another name" in failure.hint
    assert membership.phase is JobPhase.ENDED


def test_a_place_that_cannot_be_read_is_no_matter_when_another_has_a_checkpoint():
    membership = with_durable()
    join_all(membership)
    assert begun(membership.durable_answered([stored(100)], 1, ("file:///x is not there",))).decision.step == 100


UNREACHABLE = "Cannot list s3://b: 503"


@pytest.mark.parametrize("others", [[], [100]])
def test_a_tier_that_cannot_be_reached_is_not_an_empty_one(others):
    """It may have step 1000: to go on from 100, or from nothing, would give that up."""
    membership = with_durable()
    join_all(membership)
    (failure,) = membership.durable_answered([stored(step) for step in others], 1, (UNREACHABLE,), (UNREACHABLE,))
    assert isinstance(failure, Fail)
    assert failure.code == "UnreachableError"
    assert UNREACHABLE in failure.message


@pytest.mark.parametrize(("held", "goes_on"), [((105,), True), ((100,), False), ((), False)])
def test_after_a_fault_a_tier_that_cannot_be_reached_matters_if_memory_has_less_than_was_committed(held, goes_on):
    membership = after_a_death(105)
    commands = join_all(membership, held=held)
    if not goes_on:
        assert commands == [AskDurable()]
        commands = membership.durable_answered([], 1, (UNREACHABLE,), (UNREACHABLE,))
    assert kinds(commands) == [Begin if goes_on else Fail]


def test_after_a_fault_memory_is_used_without_asking():
    membership = after_a_death(105, stored(100))
    assert begun(join_all(membership, live_step=105)).decision.step == 105


def test_after_a_fault_that_memory_did_not_survive_the_durable_tiers_are_asked():
    membership = after_a_death(105)
    assert join_all(membership) == [AskDurable()]
    assert begun(membership.durable_answered([stored(100)], 1, ())).decision.step == 100


def test_a_fault_before_the_first_step_does_not_lose_the_checkpoint_it_began_from():
    """Nothing was committed in this run and nothing is in memory, and yet there is a checkpoint."""
    membership = with_durable()
    join_all(membership)
    membership.durable_answered([stored(100)], 1, ())
    membership.fault(died(2, step=0), membership.generation)  # while it restored
    assert join_all(membership) == [AskDurable()]
    assert begun(membership.durable_answered([stored(100)], 2, ())).decision.step == 100


def test_a_durable_candidate_that_is_refused_leads_to_the_next_older():
    membership = with_durable()
    join_all(membership)
    begin = begun(membership.durable_answered([stored(80), stored(90), stored(100)], 1, ()))
    (again,) = membership.restore_reported(1, begin.generation, 1, "CRC64-NVME is wrong")
    assert isinstance(again, Restore)
    assert (again.attempt, again.decision.step) == (2, 90)
    (again,) = membership.restore_reported(3, begin.generation, 2, "CRC64-NVME is wrong")
    assert isinstance(again, Restore)
    assert (again.attempt, again.decision.step) == (3, 80)
    refused = tuple(("s3://b/j", save_id_of(1, step)) for step in (100, 80, 90))
    (ask,) = membership.restore_reported(0, begin.generation, 3, "no such blob")
    assert isinstance(ask, AskDurable)
    assert set(ask.exclude) == set(refused)  # what they have not named yet, and what has come since
    (again,) = membership.durable_answered([stored(70)], 1, ())
    assert isinstance(again, Restore)
    assert again.decision.step == 70
    assert kinds(membership.restore_reported(0, begin.generation, 4, "no such blob")) == [AskDurable]
    (failure,) = membership.durable_answered([], 1, ())
    assert isinstance(failure, Fail)
    assert "The last try: rank 0: no such blob" in failure.message


def test_when_all_of_memory_is_refused_the_durable_tiers_are_asked():
    membership = after_a_death(105)
    begun(join_all(membership, held=(105,)))
    assert membership.restore_reported(0, 2, 1, "CRC64-NVME is wrong") == [AskDurable()]
    assert membership.restore_reported(1, 2, 1, "CRC64-NVME is wrong") == []  # asked once
    assert [membership.restore_reported(rank, 2, 1, "") for rank in (2, 3)] == [[], []]
    (again,) = membership.durable_answered([stored(100)], 1, ())
    assert again == Restore(2, membership.decision)
    assert membership.decision is not None
    restore_all(membership)
    assert membership.decision.step == membership.began[2] == 100


def test_an_answer_that_comes_after_the_next_fault_is_no_decision():
    membership = after_a_death(105)
    begun(join_all(membership, held=(105,)))
    membership.restore_reported(0, 2, 1, "CRC64-NVME is wrong")
    assert kinds(membership.fault(died(3), 2)) == [Abort, Replace]
    assert membership.durable_answered([stored(100)], 1, ()) == []
    assert membership.phase is JobPhase.FORMING


def test_when_nothing_is_left_anywhere_the_job_fails_with_the_last_try():
    membership = after_a_death()
    join_all(membership, held=(5,))
    assert membership.restore_reported(1, membership.generation, 1, "a flipped bit") == [AskDurable()]
    (failure,) = membership.durable_answered([], 1, ())
    assert isinstance(failure, Fail)
    assert "The last try: rank 1: a flipped bit" in failure.message


def test_what_an_earlier_generation_did_after_the_restored_step_is_not_gone_back_to():
    """Step 9 of generation 1 was refused, so generation 2 went on from 7: from then on 9 is another history."""
    membership = after_a_death(9)
    assert begun(join_all(membership, held=(9, 7))).decision.step == 9
    assert membership.restore_reported(0, 2, 1, "a flipped bit") == [AskDurable()]  # it may have more than step 7
    assert kinds(membership.durable_answered([], 1, ())) == [Restore]
    restore_all(membership)
    membership.fault(died(2), 2)
    assert begun(join_all(membership, held=(9, 7))).decision.step == 7


def test_the_durable_tiers_are_asked_where_memory_has_less_than_was_committed():
    """A node was lost with its steps 8 and 9; its replicas are of step 7, the durable checkpoint of step 8."""
    membership = after_a_death(9)
    assert join_all(membership, held=(7,)) == [AskDurable()]
    assert begun(membership.durable_answered([stored(8)], 1, ())).decision.step == 8


def test_a_first_choice_that_failed_does_not_rule_out_a_newer_durable_checkpoint():
    membership = after_a_death()
    assert begun(join_all(membership, held=(7,))).decision.step == 7
    assert membership.restore_reported(0, 2, 1, "a flipped bit") == [AskDurable()]
    (again,) = membership.durable_answered([stored(8)], 1, ())
    assert isinstance(again, Restore)
    assert again.decision.step == 8


def test_what_durable_tiers_have_besides_those_refused_is_no_answer_to_the_next_generation():
    """It refuses none as yet, and would take the rest for all that there is: it would begin anew."""
    membership = with_durable()
    join_all(membership)
    begin = begun(membership.durable_answered([stored(100)], 1, ()))
    (ask,) = membership.restore_reported(1, begin.generation, 1, "the link to it timed out")
    assert isinstance(ask, AskDurable)
    assert membership.restoring.awaits(ask.exclude)
    assert not membership.restoring.awaits(())
    membership.fault(died(2, step=0), membership.generation)
    assert membership.restoring.awaits(())
    assert not membership.restoring.awaits(ask.exclude)
    assert join_all(membership) == [AskDurable()]


def test_a_try_that_nobody_went_on_from_gives_up_no_steps():
    """A second's trouble with step 9, then with step 7: the next generation finds both, and takes the newer."""
    membership = fresh()
    start(membership)
    membership.step_committed(9)
    membership.fault(died(2), 1)
    assert begun(join_all(membership, held=(9, 7))).decision.step == 9
    (again,) = membership.restore_reported(0, 2, 1, "the link to a peer timed out")
    assert isinstance(again, Restore)
    assert again.decision.step == 7
    membership.fault(died(3), 2)
    assert membership.began == {1: 0}
    assert begun(join_all(membership, held=(9, 7))).decision.step == 9


@pytest.mark.parametrize("seed", range(300))
def test_random_histories_end_with_everybody_in_one_generation(seed: int):
    """Messages of live processes arrive in any order between ranks; deaths strike at any moment."""
    chance = random.Random(seed)
    membership = fresh(max_restarts=1000)
    # what each live rank will do next: a small model of the worker, driven by the commands it is sent
    state = dict.fromkeys(NODES, "joining")
    generation = dict.fromkeys(NODES, 1)
    deaths = chance.randrange(6)
    seen = [1]

    def obey(commands: list[Action]) -> None:
        for command in commands:
            assert not isinstance(command, Fail), command
            if isinstance(command, Begin):
                assert all(s == "waiting" for s in state.values()), "began without somebody"
                assert command.generation >= seen[-1]
                seen.append(command.generation)
                for rank in NODES:
                    state[rank], generation[rank] = "restoring", command.generation
            elif isinstance(command, Go):
                assert all(s == "restored" for s in state.values())
                for rank in NODES:
                    state[rank] = "training"
            elif isinstance(command, Abort):
                for rank in NODES:
                    if state[rank] != "dead":
                        state[rank] = "joining"
            elif isinstance(command, Replace):
                assert state[command.rank] == "dead"
                state[command.rank] = "joining"
            elif isinstance(command, Finish):
                for rank in NODES:
                    state[rank] = "finished"

    for turn in range(400):
        if all(s == "finished" for s in state.values()):
            break
        rank = chance.choice([r for r in NODES if state[r] != "dead"])
        if deaths and chance.random() < 0.1:
            deaths -= 1
            told = membership.generation
            state[rank] = "dead"
            obey(membership.fault(Fault(rank, f"killed, turn {turn}", turn, died=True, kind="signal"), told))
        elif state[rank] == "joining":
            state[rank] = "waiting"
            obey(
                membership.join(
                    rank,
                    offer(rank, 4) if chance.random() < 0.8 else None,
                    [Offer("memory", 4, r, n, "g1-s4") for r, n in NODES.items() if n == NODES[rank]],
                )
            )
        elif state[rank] == "restoring":
            state[rank] = "restored"
            obey(membership.restore_reported(rank, generation[rank], membership.attempt, ""))
        elif state[rank] == "training":
            state[rank] = "done"
            obey(membership.finished(rank, generation[rank], "digest"))
    assert all(s == "finished" for s in state.values()), (state, membership)


# --- nodes come and go --------------------------------------------------------------------------


def with_spares(*spares: int, **budgets: int) -> Membership:
    membership = Membership(NODES, Budgets(10, **budgets), states=NodeStates(NODES.values(), spares))
    start(membership)
    return membership


def test_a_lost_node_is_left_by_all_and_its_ranks_go_to_the_lowest_spare():
    membership = with_spares(2, 3)
    membership.step_committed(5)
    abort, take_over, *replaced = membership.node_lost(1, "gone")
    assert isinstance(abort, Abort)
    assert abort == Abort(2, 2)
    assert (membership.faults[0].step, membership.faults[0].node_lost, membership.faults[0].kind) == (6, True, "lost")
    assert take_over == TakeOver(2, (2, 3))
    assert replaced == [Replace(2), Replace(3)]
    assert membership.nodes == {0: 0, 1: 0, 2: 2, 3: 2}
    assert membership.states.spares == {3}
    for rank in (0, 1, 2):
        assert membership.join(rank, offer(rank, 5) if rank < 2 else None, []) == []
    (begin,) = membership.join(3, None, [])
    assert isinstance(begin, Begin)
    assert begin.decision.step == 5
    assert [begin.decision.source(rank).kind for rank in NODES] == ["self", "self", "live", "live"]
    assert NODES == {0: 0, 1: 0, 2: 1, 3: 1}


def test_while_a_generation_forms_a_lost_node_aborts_nobody_and_what_it_held_is_forgotten():
    membership = with_spares(2)
    membership.fault(died(0), 1)
    membership.join(2, offer(2, 5), held_by(1, 5))
    assert kinds(membership.node_lost(1, "gone")) == [TakeOver, Replace, Replace]
    assert membership.missing() == [0, 1, 2, 3]
    assert membership.generation == 2


def test_without_a_spare_the_ranks_wait_for_a_node_and_then_the_job_ends():
    membership = with_spares()
    assert membership.node_lost(1, "gone")[1:] == [AwaitNode(1)]
    for rank in (0, 1):
        membership.join(rank, offer(rank, 5), [])
    assert membership.missing() == []
    (failure,) = membership.no_node_came(1, 30.0)
    assert isinstance(failure, Fail)
    assert (
        "node 1 is lost at step 1: gone; the job has no spares, and no other node came within 30 s" in failure.message
    )
    assert membership.node_came(2) == []


def test_a_node_that_comes_takes_what_waits_for_it():
    membership = with_spares()
    membership.node_lost(1, "gone")
    assert membership.node_came(1) == [TakeOver(1, (2, 3)), Replace(2), Replace(3)]
    assert membership.no_node_came(1, 30.0) == []
    assert not membership.unassigned


def test_a_node_that_comes_back_takes_its_own_ranks_before_those_of_another():
    membership = with_spares()
    membership.node_lost(0, "gone")
    membership.node_lost(1, "gone")
    assert membership.node_came(1)[0] == TakeOver(1, (2, 3))
    membership.node_lost(1, "gone again")
    assert membership.node_came(9)[0] == TakeOver(9, (0, 1))
    assert membership.node_came(8)[0] == TakeOver(8, (2, 3))


@given(st.lists(st.tuples(st.sampled_from(["comes or goes", "given up", "revived"]), st.integers(0, 3)), max_size=30))
@settings(max_examples=500, deadline=None)
def test_no_node_ever_has_more_ranks_than_a_node_has(history: list[tuple[str, int]]):
    budgets = Budgets(1000, max_node_losses=1000)
    membership, present = Membership(NODES, budgets), {0, 1}
    for number, (what, node) in enumerate(history):
        if what == "comes or goes" and node in present:
            present.discard(node)
            membership.node_lost(node, f"gone {number}")
        elif what == "comes or goes":
            present.add(node)
            membership.node_came(node)
        elif what == "given up" and (ranks := membership.ranks_on(node)):
            membership.fault(
                Fault(ranks[0], f"broken {number}", 1, died=True, kind="signal", node_lost=True), membership.generation
            )
            present.discard(node)  # it has left the job, and may come again as a new one
            membership.decommissioned(node, [])
        elif what == "revived":
            data = json.loads(json.dumps(membership.to_json()))
            membership, _ = Membership.revived(data, budgets, durable=False, generation=1, committed=0)
        has = Counter(its for rank, its in membership.nodes.items() if rank not in membership.unassigned)
        assert membership.phase is not JobPhase.ENDED
        assert set(has) <= present
        assert set(has.values()) <= {2}
        assert not membership.unassigned or not membership.states.spares


def test_a_lost_spare_is_nobodys_fault():
    membership = with_spares(2)
    assert membership.node_lost(2, "gone") == []
    assert (membership.states.spares, membership.phase, membership.faults) == (set(), JobPhase.RUNNING, [])


def test_a_node_whose_processes_die_again_and_again_is_given_up_for_a_spare_and_its_memory_still_counts():
    membership = with_spares(2, max_on_node=1)
    membership.fault(died(2, step=3), 1)
    for rank in NODES:
        membership.join(rank, offer(rank, 2), [])
    for rank in NODES:
        membership.restore_reported(rank, 2, 1, "")
    commands = membership.fault(died(3, step=4), 2)
    assert kinds(commands) == [Abort, Decommission, TakeOver, Replace, Replace]
    held = [replace(one, save_id="g2-s3") for one in (*held_by(0, 3), *held_by(1, 3))]
    for rank in NODES:
        assert membership.join(rank, None, held[:2] if rank < 2 else []) == []
    (begin,) = membership.decommissioned(1, held[2:])
    assert isinstance(begin, Begin)
    assert begin.decision.step == 3
    assert {begin.decision.source(rank).kind for rank in (2, 3)} == {"peer"}
    assert [fault.level for fault in membership.faults] == [EscalationLevel.PROCESS, EscalationLevel.NODE]


def test_without_a_spare_a_node_that_fails_often_is_kept():
    membership = with_spares(max_on_node=0)
    assert kinds(membership.fault(died(3, step=4), 1)) == [Abort, Replace]


def test_an_exception_that_comes_again_and_again_costs_the_process():
    membership = with_spares(max_in_process=1)
    assert kinds(membership.fault(raised(2, step=3), 1)) == [Abort]
    assert kinds(membership.fault(raised(2, step=4, cause="KeyError: y"), 2)) == [Replace]


def test_a_node_that_is_lost_too_often_is_not_taken_again():
    membership = with_spares(2, 3, quarantine_after=2)
    membership.node_lost(1, "gone")
    assert not membership.is_shut_out(1)
    membership.states.count_loss(1)
    assert membership.is_shut_out(1)


def revived(membership: Membership, **heard: int) -> tuple[Membership, list[Action]]:
    data = json.loads(json.dumps(membership.to_json()))
    heard = {"generation": 1, "committed": 0, **heard}
    return Membership.revived(data, Budgets(10), durable=False, **heard)


def test_another_coordinator_begins_a_generation_above_all_that_anybody_has_heard_of():
    membership = with_spares(2)
    membership.fault(raised(0, step=2), 1)
    again, (abort,) = revived(membership, generation=7, committed=9)
    assert isinstance(abort, Abort)
    assert (abort.generation, again.generation, again.committed) == (8, 8, 9)
    assert (again.phase, again.nodes, again.states.spares, again.began) == (JobPhase.FORMING, NODES, {2}, {1: 0})
    assert again.faults == membership.faults
    assert kinds(again.node_lost(0, "gone")) == [TakeOver, Replace, Replace]
    assert again.nodes == {0: 2, 1: 2, 2: 1, 3: 1}


def test_ranks_without_a_node_wait_under_another_coordinator_too():
    membership = with_spares()
    membership.node_lost(1, "gone")
    again, commands = revived(membership)
    assert commands[1:] == [AwaitNode(1)]
    assert again.unassigned == {2, 3}
    assert isinstance(again.no_node_came(1, 5.0)[0], Fail)


def test_a_job_that_was_done_stays_done_under_another_coordinator():
    membership = with_spares()
    for rank in NODES:
        membership.finished(rank, 1, "")
    again, commands = revived(membership)
    assert (again.phase, commands) == (JobPhase.ENDED, [])
    assert again.node_lost(0, "gone") == []


def test_nodes_and_ranks_that_fail_in_any_order_leave_nobody_behind():
    for seed in range(300):
        rng = random.Random(seed)
        budgets = Budgets(1000, max_node_losses=1000, max_on_node=2)
        membership = Membership(NODES, budgets, states=NodeStates(NODES.values(), {2, 3, 4}))
        alive = {0, 1, 2, 3, 4}
        for _ in range(rng.randint(1, 30)):
            rank = rng.choice(list(NODES))
            match rng.randrange(6):
                case 0:
                    membership.fault(died(rank, rng.randint(1, 1000)), membership.generation)
                case 1 if len(alive) > 1:
                    node = rng.choice(sorted(alive))
                    alive.discard(node)
                    membership.node_lost(node, f"gone {rng.random()}")
                case 2 if len(alive) < 5:
                    node = min({0, 1, 2, 3, 4} - alive)
                    alive.add(node)
                    membership.node_came(node)
                case _ if rank not in membership.unassigned:
                    membership.join(rank, offer(rank, 1), [])
            assert {membership.nodes[rank] for rank in NODES if rank not in membership.unassigned} <= alive
            assert not (
                membership.states.spares & {membership.nodes[r] for r in NODES if r not in membership.unassigned}
            )
            assert (
                not (membership.unassigned & membership.restoring.joined.keys())
                or membership.phase is not JobPhase.FORMING
            )
            if membership.unassigned:
                assert not membership.states.spares
