"""The membership under ordered and disordered messages."""

from __future__ import annotations

import random

import pytest

from hyperpod_ext.runtime.checkpoint.choose import Offer
from hyperpod_ext.runtime.checkpoint.manifest import save_id_of
from hyperpod_ext.runtime.rendezvous.membership import (
    Abort,
    AskDurable,
    Begin,
    Command,
    Fail,
    Fault,
    Finish,
    Go,
    Membership,
    Phase,
    Replace,
    Restore,
)

NODES = {0: 0, 1: 0, 2: 1, 3: 1}


def fresh(max_restarts: int = 10) -> Membership:
    return Membership(NODES, max_restarts)


def offer(rank: int, step: int, generation: int = 1) -> Offer:
    return Offer("live", step, rank, NODES[rank], f"g{generation}-s{step}")


def memory(rank: int, step: int) -> Offer:
    """A rank's own part in its node's memory, that no other rank's replaces."""
    return Offer("memory", step, rank, NODES[rank], f"g1-s{step}", own_digest=f"own{rank}", sharing="shard")


def held_by(node: int, *steps: int) -> list[Offer]:
    return [memory(rank, step) for rank in NODES if NODES[rank] == node for step in steps]


def died(rank: int, step: int = 3) -> Fault:
    return Fault(rank, "killed by SIGKILL (9)", step, died=True)


def raised(rank: int, step: int = 3, cause: str = "ValueError: x") -> Fault:
    return Fault(rank, cause, step, died=False)


def start(membership: Membership, step: int | None = None) -> None:
    """Everybody joins (with live state of `step`), restores and goes."""
    for rank in NODES:
        membership.join(rank, None if step is None else offer(rank, step), [])
    for rank in NODES:
        membership.restore_reported(rank, membership.generation, membership.attempt, "")
    assert membership.phase is Phase.RUNNING


def kinds(commands: list[Command]) -> list[type]:
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


def test_a_death_raises_the_generation_and_asks_for_a_replacement():
    membership = fresh()
    start(membership)
    commands = membership.fault(died(2), 1)
    assert commands == [Abort(2, died(2)), Replace(2)]


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
    assert 0 not in membership.joined


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


def test_a_final_fault_is_not_tried_again():
    membership = fresh()
    fault = Fault(1, "ModuleNotFoundError: nope", 0, died=True, final=True)
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
    return Membership(NODES, 10, durable=True)


def stored(step: int, generation: int = 1, world_size: int = 4) -> Offer:
    save_id = f"g{generation}-s{step}"
    return Offer("s3", step, -1, -1, save_id, world_size=world_size, url="s3://b/j", folder=f"folder of {save_id}")


def join_all(membership: Membership, live_step: int | None = None, held: tuple[int, ...] = ()) -> list[Command]:
    """Every rank joins, with live state or snapshots of the generation before."""
    commands: list[Command] = []
    for rank, node in NODES.items():
        live = None if live_step is None else offer(rank, live_step, membership.generation - 1)
        commands = membership.join(rank, live, held_by(node, *held))
    return commands


def restore_all(membership: Membership) -> None:
    for rank in NODES:
        membership.restore_reported(rank, membership.generation, membership.attempt, "")
    assert membership.phase is Phase.RUNNING


def begun(commands: list[Command]) -> Begin:
    (begin,) = commands
    assert isinstance(begin, Begin)
    return begin


def test_at_the_start_the_durable_tiers_are_asked_before_anything_is_decided():
    membership = with_durable()
    assert join_all(membership) == [AskDurable()]
    assert membership.phase is Phase.FORMING
    begin = begun(membership.durable_answered([], 0, ()))
    assert {source.kind for (source,) in begin.decision.sources.values()} == {"fresh"}


def test_a_job_without_durable_tiers_asks_nobody():
    assert kinds(join_all(fresh())) == [Begin]


def test_a_job_goes_on_from_what_an_earlier_run_left():
    membership = with_durable()
    join_all(membership)
    begin = begun(membership.durable_answered([stored(90), stored(100)], 1, ()))
    assert begin.decision.step == 100
    assert {source.kind for (source,) in begin.decision.sources.values()} == {"s3"}


@pytest.mark.parametrize("seen", [1, 7])
def test_generations_follow_the_newest_that_was_ever_seen(seen):
    membership = with_durable()
    join_all(membership)
    assert begun(membership.durable_answered([stored(100, seen)], seen, ())).generation == seen + 1
    restore_all(membership)
    assert membership.fault(died(2), seen + 1)[0] == Abort(seen + 2, died(2))
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
    assert membership.phase is Phase.ENDED


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
    membership = with_durable()
    join_all(membership)
    membership.durable_answered([], 0, ())
    restore_all(membership)
    membership.step_committed(105)
    membership.fault(died(2), membership.generation)
    commands = join_all(membership, held=held)
    if not goes_on:
        assert commands == [AskDurable()]
        commands = membership.durable_answered([], 1, (UNREACHABLE,), (UNREACHABLE,))
    assert kinds(commands) == [Begin if goes_on else Fail]


def test_after_a_fault_memory_is_used_without_asking():
    membership = with_durable()
    join_all(membership)
    membership.durable_answered([stored(100)], 1, ())
    restore_all(membership)
    membership.step_committed(105)
    membership.fault(died(2), membership.generation)
    assert begun(join_all(membership, live_step=105)).decision.step == 105


def test_after_a_fault_that_memory_did_not_survive_the_durable_tiers_are_asked():
    membership = with_durable()
    join_all(membership)
    membership.durable_answered([], 0, ())
    restore_all(membership)
    membership.step_committed(105)
    membership.fault(died(2), membership.generation)
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
    assert set(ask.besides) == set(refused)  # what they have not named yet, and what has come since
    (again,) = membership.durable_answered([stored(70)], 1, ())
    assert isinstance(again, Restore)
    assert again.decision.step == 70
    assert kinds(membership.restore_reported(0, begin.generation, 4, "no such blob")) == [AskDurable]
    (failure,) = membership.durable_answered([], 1, ())
    assert isinstance(failure, Fail)
    assert "The last try: rank 0: no such blob" in failure.message


def test_when_all_of_memory_is_refused_the_durable_tiers_are_asked():
    membership = with_durable()
    join_all(membership)
    membership.durable_answered([], 0, ())
    restore_all(membership)
    membership.step_committed(105)
    membership.fault(died(2), membership.generation)
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
    membership = with_durable()
    join_all(membership)
    membership.durable_answered([], 0, ())
    restore_all(membership)
    membership.step_committed(105)
    membership.fault(died(2), 1)
    begun(join_all(membership, held=(105,)))
    membership.restore_reported(0, 2, 1, "CRC64-NVME is wrong")
    assert kinds(membership.fault(died(3), 2)) == [Abort, Replace]
    assert membership.durable_answered([stored(100)], 1, ()) == []
    assert membership.phase is Phase.FORMING


def test_when_nothing_is_left_anywhere_the_job_fails_with_the_last_try():
    membership = with_durable()
    join_all(membership)
    membership.durable_answered([], 0, ())
    restore_all(membership)
    membership.fault(died(2), membership.generation)
    join_all(membership, held=(5,))
    assert membership.restore_reported(1, membership.generation, 1, "a flipped bit") == [AskDurable()]
    (failure,) = membership.durable_answered([], 1, ())
    assert isinstance(failure, Fail)
    assert "The last try: rank 1: a flipped bit" in failure.message


def test_what_an_earlier_generation_did_after_the_restored_step_is_not_gone_back_to():
    """Step 9 of generation 1 was refused, so generation 2 went on from 7: from then on 9 is another history."""
    membership = with_durable()
    join_all(membership)
    membership.durable_answered([], 0, ())
    restore_all(membership)
    membership.step_committed(9)
    membership.fault(died(2), 1)
    assert begun(join_all(membership, held=(9, 7))).decision.step == 9
    assert membership.restore_reported(0, 2, 1, "a flipped bit") == [AskDurable()]  # it may have more than step 7
    assert kinds(membership.durable_answered([], 1, ())) == [Restore]
    restore_all(membership)
    membership.fault(died(2), 2)
    assert begun(join_all(membership, held=(9, 7))).decision.step == 7


def test_the_durable_tiers_are_asked_where_memory_has_less_than_was_committed():
    """A node was lost with its steps 8 and 9; its replicas are of step 7, the durable checkpoint of step 8."""
    membership = with_durable()
    join_all(membership)
    membership.durable_answered([], 0, ())
    restore_all(membership)
    membership.step_committed(9)
    membership.fault(died(2), 1)
    assert join_all(membership, held=(7,)) == [AskDurable()]
    assert begun(membership.durable_answered([stored(8)], 1, ())).decision.step == 8


def test_a_first_choice_that_failed_does_not_rule_out_a_newer_durable_checkpoint():
    membership = with_durable()
    join_all(membership)
    membership.durable_answered([], 0, ())
    restore_all(membership)
    membership.fault(died(2), 1)
    assert begun(join_all(membership, held=(7,))).decision.step == 7
    assert membership.restore_reported(0, 2, 1, "a flipped bit") == [AskDurable()]
    (again,) = membership.durable_answered([stored(8)], 1, ())
    assert isinstance(again, Restore)
    assert again.decision.step == 8


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

    def obey(commands: list[Command]) -> None:
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
            obey(membership.fault(Fault(rank, f"killed, turn {turn}", turn, died=True), told))
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
