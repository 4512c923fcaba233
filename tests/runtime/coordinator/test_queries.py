"""A connection that ends by itself: found once all agents have said that their ranks live."""

from __future__ import annotations

import os

from hyperpod_ext.runtime.coordinator.queries import LivenessQuery, all_live
from hyperpod_ext.runtime.membership.actions import Fault

FAULT = Fault(1, "RuntimeError: Connection closed by peer", 7, died=False, kind="connection")


def test_it_is_a_fault_once_every_node_has_answered_and_only_once():
    query = LivenessQuery(3, FAULT, {0, 1, 2})
    assert query.alive(0, 3) is None
    assert query.alive(0, 3) is None
    assert query.alive(1, 2) is None, "of another generation"
    assert query.alive(1, 3) is None
    assert query.alive(2, 3) == FAULT
    assert query.alive(2, 3) is None


def test_a_process_that_has_ended_is_seen_before_anybody_has_waited_for_it():
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    assert all_live([os.getpid(), child])
    os.close(writing)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert not all_live([os.getpid(), child])
    os.waitpid(child, 0)
    assert not all_live([child])
