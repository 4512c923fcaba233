"""How senders are held back: decisions without time, and a bucket on a clock of its own."""

from __future__ import annotations

import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ext.runtime.memory_server.replication.rate_limit import RateLimit, next_rate

positive = st.floats(1.0, 1e12)


class Clock:
    """Goes on only while somebody sleeps."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@given(positive, positive, st.floats(0.0501, 10), st.floats(0, 1e12))
def test_too_slow_steps_lower_the_rate_but_not_below_the_floor(rate, achieved, slowdown, floor):
    after = next_rate(rate, achieved, slowdown, 0.05, floor)
    assert after == floor or after <= 0.9 * min(rate, achieved)


@given(positive, positive, st.floats(-0.5, 0.05), st.floats(0, 1e12))
def test_steps_that_are_fast_enough_raise_the_rate(rate, achieved, slowdown, floor):
    assert next_rate(rate, achieved, slowdown, 0.05, floor) > rate


def test_a_limit_that_does_not_limit_is_none():
    assert next_rate(1.9e9, 1e9, 0.0, 0.05, 0) == math.inf


class Sending:
    """A trainer whose steps take longer the more is sent beside them, on a clock that it moves itself."""

    def __init__(self, max_slowdown: float, cost_s_per_byte: float, cost_of_sending: float = 0.0) -> None:
        self.now = 0.0
        self.rate_limit = RateLimit(max_slowdown, lambda: self.now)
        self.cost, self.cost_of_sending = cost_s_per_byte, cost_of_sending

    def step(self, *, sending: bool, link: float = 1e9, idle_s: float = 1.0) -> float:
        sent = min(link, self.rate_limit.rate) * idle_s if sending else 0.0
        seconds = idle_s + sent * self.cost + (self.cost_of_sending * idle_s if sending else 0.0)
        if sending:
            self.rate_limit.copy_begins()
            self.rate_limit.take(int(sent), lambda: True)
        self.now += seconds
        if sending:
            self.rate_limit.copy_ends()
        self.rate_limit.observe_step(seconds, sending)
        return seconds


def test_sending_settles_where_steps_take_as_much_longer_as_they_may():
    trainer = Sending(0.05, cost_s_per_byte=0.5e-9)  # at full speed a step takes half as long again
    for _ in range(60):
        trainer.step(sending=False)
        last = trainer.step(sending=True)
    assert 1.02 < last < 1.06


def test_sending_that_costs_the_same_however_slow_it_is_is_soon_as_fast_as_it_goes():
    trainer = Sending(0.05, cost_s_per_byte=0, cost_of_sending=0.2)  # slower, it only takes longer
    rates = []
    for _ in range(400):
        trainer.step(sending=False)
        trainer.step(sending=True)
        rates.append(trainer.rate_limit.rate)
    assert rates.count(math.inf) > 300
    assert len(set(rates)) > 1  # now and then it is tried again


def test_a_copy_that_fits_in_a_step_is_spread_over_more():
    """One step has all of the cost of a copy, at whatever rate, until the copy is too slow to be done in one."""
    rate_limit, now = RateLimit(0.05, lambda: now), 0.0
    for _ in range(60):
        rate_limit.observe_step(1.0, sending=False)
        left, steps = 100e6, []
        rate_limit.copy_begins()
        while left > 0:
            sent = min(left, 1e9 * 0.8, rate_limit.rate * 1.0)
            rate_limit.take(int(sent), lambda: True)
            now += sent / min(1e9, rate_limit.rate)
            left -= sent
            steps.append(1.0 + 2e-9 * sent)
            if left <= 0:
                rate_limit.copy_ends()
            rate_limit.observe_step(steps[-1], sending=True)
    assert max(steps) < 1.08


def test_a_step_at_whose_end_a_copy_begins_says_nothing_of_copies():
    rate_limit = RateLimit(0.05)
    for _ in range(100):
        rate_limit.observe_step(1.0, sending=0.0)
        rate_limit.take(1000, lambda: True)
        rate_limit.observe_step(9.0, sending=0.1)
    assert rate_limit.rate == math.inf


def test_sending_that_costs_nothing_is_not_held_back():
    trainer = Sending(0.05, cost_s_per_byte=0)
    for _ in range(30):
        trainer.step(sending=False)
        trainer.step(sending=True)
    assert trainer.rate_limit.rate == math.inf


def test_a_copy_is_done_before_the_next_is_due_whatever_it_costs():
    trainer = Sending(0.05, cost_s_per_byte=1e-8)
    trainer.rate_limit.finish_within(400_000_000, 2.0)
    for _ in range(60):
        trainer.step(sending=False)
        trainer.step(sending=True)
    assert trainer.rate_limit.rate == pytest.approx(2e8)


def test_the_bucket_lets_through_what_the_rate_allows():
    clock = Clock()
    rate_limit = RateLimit(0.05, clock.now, clock.sleep)
    rate_limit.rate = 100e6
    for _ in range(11):
        rate_limit.take(1_000_000, lambda: False)
    assert clock.time == pytest.approx(0.1)


def test_what_is_given_up_waits_no_longer():
    clock = Clock()
    rate_limit = RateLimit(0.05, clock.now, clock.sleep)
    rate_limit.rate = 1.0
    rate_limit.take(1000, lambda: False)
    rate_limit.take(1000, lambda: clock.time > 1.0)
    assert 1.0 < clock.time < 1.5


def test_an_unthrottled_sender_waits_no_more():
    rate_limit = RateLimit(0.05)
    rate_limit.rate = 1.0
    rate_limit.take(1000, lambda: False)
    waiting = threading.Thread(target=rate_limit.take, args=(1000, lambda: False), daemon=True)
    waiting.start()
    rate_limit.unthrottle()
    waiting.join(5)
    assert not waiting.is_alive()
    rate_limit.finish_within(1000, 10.0)
    assert (rate_limit.rate, rate_limit.floor) == (math.inf, 100.0)
