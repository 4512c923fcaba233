"""All ranks stop after one step, or none does."""

from __future__ import annotations

from hyperpod_ext.runtime.membership.stop_agreement import Answer, StopAgreement


def answer(stop: StopAgreement, rank: int, can: bool, making: int, *, over: bool = False) -> Answer:
    return stop.answered(rank, stop.number, can, making, over)


def test_ranks_stop_after_the_step_that_they_make_or_later_where_some_are_past_it() -> None:
    stop = StopAgreement(ranks=2, ahead=1, farthest=1024)
    assert stop.ask(-1, newest=6) == 7
    assert [answer(stop, 0, True, 7), answer(stop, 1, False, 9)] == [Answer.WAIT, Answer.ASK_AGAIN]
    assert stop.ask(-2, newest=8) == 11
    assert stop.answered(0, -1, True, 7, False) is Answer.WAIT, "of the question before"
    assert [answer(stop, rank, True, 10) for rank in (0, 1)] == [Answer.WAIT, Answer.AGREED]
    assert [stop.stopped(rank, -2) for rank in (0, 0, 1)] == [False, False, True]


def test_a_rank_that_stopped_before_all_had_agreed_is_waited_for_again() -> None:
    stop = StopAgreement(ranks=2, ahead=2, farthest=4096)
    stop.ask(1, newest=0)
    assert not stop.stopped(0, 1)
    assert [answer(stop, rank, True, 1) for rank in (0, 1)] == [Answer.WAIT, Answer.AGREED]
    assert [stop.stopped(rank, 1) for rank in (1, 0)] == [False, True]


def test_ranks_that_have_yet_to_begin_are_asked_in_a_moment() -> None:
    stop = StopAgreement(ranks=2, ahead=1, farthest=1024)
    stop.ask(1, newest=0)
    assert [answer(stop, 0, True, 1), answer(stop, 1, False, -1)] == [Answer.WAIT, Answer.ASK_LATER]
    assert stop.ask(2, newest=12) == 13, "no further ahead: nobody was past it"


def test_a_rank_that_makes_no_more_steps_says_so() -> None:
    stop = StopAgreement(ranks=2, ahead=1, farthest=1024)
    stop.ask(1, newest=12)
    assert answer(stop, 0, False, 13, over=True) is Answer.ENDING


def test_quick_ranks_are_asked_further_ahead_each_time_up_to_a_limit() -> None:
    stop = StopAgreement(ranks=1, ahead=1, farthest=4)
    ahead = []
    for number in range(1, 6):
        ahead.append(stop.ask(number, newest=100) - 100)
        assert stop.answered(0, number, False, 100, False) is Answer.ASK_AGAIN
    assert ahead == [1, 2, 4, 4, 4]
