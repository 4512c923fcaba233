"""Which waits are ended: those that no event thread is left to wake."""

from __future__ import annotations

import threading
import time

from hyperpod_ext.runtime.process_group.gloo.lost_wakeups import LostWakeupMonitor
from hyperpod_ext.runtime.process_group.gloo.sockets import EventLoop
from hyperpod_ext.runtime.process_group.gloo.waits import Look, Sleep, StuckWait

BUFFER = StuckWait(Sleep(7, 0x1000, timed=True), buffer=0xF00, in_pair=False)
PAIR = StuckWait(Sleep(8, 0x2000, timed=True), buffer=0, in_pair=True)
EITHER = StuckWait(Sleep(9, 0x3000, timed=True), buffer=0x2F00, in_pair=True)
LOOP = 5
"""An epoll set."""


class Process:
    """What is seen of a process at each look, and which waits were ended."""

    def __init__(self) -> None:
        self.now = Look([], set(), [])
        self.ended: list[StuckWait] = []

    def look(self) -> Look:
        return self.now

    def end(self, lost: StuckWait, why: str) -> None:
        assert why
        self.ended.append(lost)

    def sees(self, *asleep: StuckWait, polled: tuple[int, ...] = (LOOP,), running: tuple[int, ...] = ()) -> None:
        self.now = Look(list(asleep), set(polled), list(running))


def forgotten(process: Process, *loops: EventLoop) -> LostWakeupMonitor:
    return LostWakeupMonitor(process, lambda: loops, 4)  # type: ignore[arg-type]


def run_for(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_wait_that_is_seen_twice_while_event_threads_sleep_is_ended():
    process = Process()
    waits = forgotten(process)
    process.sees(BUFFER)
    waits.look(busy=[LOOP])
    assert process.ended == []
    waits.look(busy=[LOOP])
    assert process.ended == [BUFFER]


def test_one_that_was_woken_and_sleeps_elsewhere_is_not():
    process = Process()
    waits = forgotten(process)
    process.sees(BUFFER)
    waits.look(busy=[])
    process.sees(StuckWait(Sleep(7, 0x1008, timed=True), 0xF00, in_pair=False))
    waits.look(busy=[])
    assert process.ended == []


def test_an_event_thread_that_has_had_no_core_yet_may_still_wake_them():
    process, over = Process(), threading.Event()
    starved = threading.Thread(target=over.wait)
    starved.start()
    assert starved.native_id is not None
    waits = forgotten(process)
    process.sees(BUFFER, polled=(), running=(starved.native_id,))
    for _ in range(3):
        waits.look(busy=[LOOP])
    assert process.ended == []
    process.sees(BUFFER)
    waits.look(busy=[LOOP])
    waits.look(busy=[LOOP])
    assert process.ended == [BUFFER]
    over.set()
    starved.join()


def test_an_event_thread_that_turns_in_circles_has_been_through_all_connections():
    process = Process()
    waits = forgotten(process)
    process.sees(BUFFER, polled=(), running=(threading.get_native_id(),))
    waits.look(busy=[LOOP])
    run_for(0.01)
    waits.look(busy=[LOOP])
    assert process.ended == []
    waits.look(busy=[LOOP])
    assert process.ended == [BUFFER]


def test_a_connection_that_is_being_made_is_answered_for_and_what_may_be_a_buffer_in_it_comes_after_that():
    process = Process()
    nobody = EventLoop(LOOP, {}, ("127.0.0.1", 1))  # refuses
    waits = forgotten(process, nobody)
    process.sees(PAIR, EITHER, BUFFER)
    waits.look(busy=[])
    waits.look(busy=[])
    assert process.ended == [BUFFER]
    process.sees(PAIR, EITHER)
    waits.look(busy=[])
    assert process.ended == [BUFFER, EITHER]
