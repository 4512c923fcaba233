"""SIGUSR1 from hyperpodrun: heard by all, agreed one step ahead."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from ranks import Member, Ranks
from world_of_one import world_of_one

from hyperpod_ext.runtime.control_plane.elastic_events import ElasticEvent, StopAtElasticEvent


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_who_listened_before_goes_on_hearing():
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda signum, frame: heard.append(signum))
    event = ElasticEvent()
    assert not event.received
    os.kill(os.getpid(), signal.SIGUSR1)
    assert event.received
    assert heard == [signal.SIGUSR1]


def stops(member: Member) -> None:
    """Each rank hears of it at another moment, rank 2 never; each is as slow as it is."""
    while member.join():
        event = ElasticEvent()
        stop_at_step = StopAtElasticEvent(event, lambda step: None)
        stop_at_step.begin(1, 100)
        for step in range(1, 100):
            if step == (7, 5, 1000)[member.rank]:
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.002 * member.rank)
            consistent = step % 4 == 0  # gradients are accumulated over four
            if stop_at_step.stops_after(step, consistent=consistent):
                member.send("stopped", step)
                break
        dist.barrier()
        member.groups.close()


def test_all_stop_after_the_same_step_and_where_the_state_is_whole():
    with Ranks(3, stops) as ranks:
        ranks.begin()
        assert ranks.hear("stopped") == {0: (8,), 1: (8,), 2: (8,)}
        ranks.end()


def test_nobody_stops_before_the_next_step():
    with world_of_one():
        event = ElasticEvent()
        stop_at_step = StopAtElasticEvent(event, lambda step: None)
        stop_at_step.begin(1, 9)
        assert not stop_at_step.stops_after(1, consistent=True)
        event.received = True
        assert not stop_at_step.stops_after(2, consistent=True), "others may have read nothing yet"
        assert stop_at_step.stops_after(3, consistent=True)


def test_told_in_the_last_step_all_stop_after_it():
    with world_of_one():
        event = ElasticEvent()
        stop_at_step = StopAtElasticEvent(event, lambda step: None)
        stop_at_step.begin(8, 9)
        assert not stop_at_step.stops_after(8, consistent=True)
        event.received = True
        assert stop_at_step.stops_after(9, consistent=True)
