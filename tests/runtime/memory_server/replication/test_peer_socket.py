"""How much a connection between memory servers keeps on its way."""

from __future__ import annotations

import socket
import threading

import pytest

from hyperpod_ext.runtime.memory_server.client import peer_socket as ps


@pytest.mark.parametrize(("rtt_s", "small"), [(20e-6, True), (200e-6, True), (500e-6, False), (2e-3, False)])
def test_only_where_the_answers_come_soon_is_the_send_buffer_small(rtt_s, small):
    assert (ps.send_buffer(rtt_s) is not None) == small


@pytest.mark.parametrize("rtt_s", [1e-6 * 1.3**n for n in range(40)])
def test_a_small_send_buffer_holds_what_a_connection_carries_in_a_round_trip(rtt_s):
    buffer = ps.send_buffer(rtt_s)
    assert buffer is None or 2 * buffer >= rtt_s * 1.25e9


def test_both_ends_of_a_connection_of_this_machine_have_a_small_one():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            before = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            for end in (one, other):
                ps.prepare(end, 1.0)
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * 192 * 1024 < before


def test_where_a_thread_cannot_be_had_that_is_a_failure_and_the_others_are_waited_for(monkeypatch):
    """As at a container's limit of processes."""
    start, done = threading.Thread.start, []

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name == "work" and threads.count(thread) == 0:
            threads.append(thread)
            if len(threads) == 3:
                raise RuntimeError("can't start new thread")
        start(thread)

    threads: list[threading.Thread] = []
    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    failures = ps.in_threads(done.append, 5, "work")
    assert [str(failure) for failure in failures] == ["can't start new thread"]
    assert sorted(done) == [0, 1]
