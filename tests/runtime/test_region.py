"""Memory that a memory server touches ahead of the first save."""

from __future__ import annotations

import os
import threading

import pytest

from hyperpod_ext.runtime.memory_server import region


def test_its_pages_are_touched_beside_whatever_else_the_node_does(monkeypatch: pytest.MonkeyPatch):
    """And by one thread alone: the server's others, which answer and send, keep their share of the machine."""
    seen: list[int] = []

    def populate(memory: object, stop: object) -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    monkeypatch.setattr(region, "populate", populate)
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    made = region.Region("test", 1000, 2)
    made.close()
    assert seen == [10]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
