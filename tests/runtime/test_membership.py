"""The membership under ordered and disordered messages."""

from __future__ import annotations

import random

import pytest

from hyperpod_ext.runtime.checkpoint.choose import Offer
from hyperpod_ext.runtime.rendezvous.membership import (
    Abort,
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


def offer(rank: int, step: int) -> Offer:
    return Offer("live", step, rank, NODES[rank], f"g1-s{step}")


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
    assert {source.kind for source in begin.decision.sources.values()} == {"fresh"}


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
    assert begin.decision.sources[2].kind == "memory"
    (again,) = membership.restore_reported(2, 2, 1, "CRC64-NVME is wrong")
    assert isinstance(again, Restore)
    assert again.decision.step == 5
    assert again.decision.sources[2].kind == "live"
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
