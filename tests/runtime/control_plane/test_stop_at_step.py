"""Where ranks stop: nobody before all can, and nobody who is past it."""

from __future__ import annotations

import threading

import pytest

from hyperpod_ext.runtime.control_plane.stop_at_step import StopAtStep
from hyperpod_ext.runtime.ipc.control_messages import StopAnswer
from hyperpod_ext.runtime.ipc.declared import encode


@pytest.fixture
def said() -> list[dict]:
    return []


@pytest.fixture
def stop_at_step(said: list[dict]) -> StopAtStep:
    made = StopAtStep(lambda report: said.append(encode(report)))
    made.begin(5, 20)
    return made


def test_a_rank_that_can_stops_after_the_step_once_all_can(stop_at_step, said):
    stop_at_step.ask(1, 6)
    assert said == [encode(StopAnswer(number=1, can=True, at=5, over=False))]
    assert not stop_at_step.stops_after(5, consistent=True)
    stop_at_step.agree(1)
    assert stop_at_step.stops_after(6, consistent=True)


def test_it_waits_there_for_the_word_of_the_others(stop_at_step):
    stop_at_step.ask(1, 5)
    stops: list[bool] = []
    rank = threading.Thread(target=lambda: stops.append(stop_at_step.stops_after(5, consistent=True)))
    rank.start()
    rank.join(0.05)
    assert rank.is_alive()
    stop_at_step.agree(1)
    rank.join()
    assert stops == [True]


def test_if_another_cannot_it_goes_on(stop_at_step):
    stop_at_step.ask(1, 5)
    stops: list[bool] = []
    rank = threading.Thread(target=lambda: stops.append(stop_at_step.stops_after(5, consistent=True)))
    rank.start()
    stop_at_step.ask(2, 9)  # the next question takes the first one back
    rank.join()
    assert stops == [False]


@pytest.mark.parametrize(
    ("step", "can", "over"), [(4, False, False), (5, True, False), (19, True, False), (20, False, True)]
)
def test_what_is_past_or_after_the_end_it_cannot(stop_at_step, said, step, can, over):
    stop_at_step.ask(1, step)
    assert (said[0]["can"], said[0]["over"]) == (can, over)


def test_before_the_loop_it_cannot_say(said):
    made = StopAtStep(lambda report: said.append(encode(report)))
    made.ask(1, 3)
    assert (said[0]["can"], said[0]["at"], said[0]["over"]) == (False, -1, False)


def test_in_the_middle_of_an_accumulation_it_goes_on_to_its_end(stop_at_step):
    stop_at_step.ask(1, 6)
    stop_at_step.agree(1)
    assert not stop_at_step.stops_after(6, consistent=False)
    assert stop_at_step.stops_after(7, consistent=True)


def test_whoever_stands_goes_on_when_the_change_is_dropped_or_the_generation_ends(stop_at_step, said):
    for withdrawn in (1, None):
        stop_at_step.ask(1, 5)
        stop_at_step.agree(1)
        thread = threading.Thread(target=stop_at_step.stop, args=(5,))
        thread.start()
        stop_at_step.withdraw(withdrawn)
        thread.join(5)
        assert not thread.is_alive()
    assert [word["type"] for word in said].count("rank_stopped") == 2
