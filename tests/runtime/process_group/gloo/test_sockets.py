"""Which sockets are gloo's: never one that has taken the number of a former one."""

from __future__ import annotations

import ctypes
import os
import select
import socket
from collections.abc import Iterator

import pytest
import warm_code

from hyperpod_ext.runtime.process_group.gloo import sockets
from hyperpod_ext.runtime.process_group.gloo.sockets import (
    EventLoop,
    duplicate,
    end_reading,
    event_loops,
    event_loops_among,
    quieten,
)

_POINTER = 0x7F00_1234_5678_9AB0
"""What gloo registers with a socket."""


class Loop:
    """An epoll set as gloo's event threads have it, with one connection."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.pipe = os.pipe()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.connection, self.other_side = socket.socketpair()
        for fd in (self.pipe[0], self.listener.fileno(), self.connection.fileno()):
            self.add(fd)

    def look(self) -> EventLoop:
        (loop,) = (loop for loop in event_loops() if loop.epoll == self.epoll.fileno())
        return loop

    def connections(self) -> list[int]:
        return [connection.fd for connection in self.look().connections.values()]

    def add(self, fd: int, events: int = select.EPOLLIN) -> None:
        event = sockets._Event(events, _POINTER)
        added = sockets._libc.epoll_ctl(self.epoll.fileno(), 1, fd, ctypes.byref(event))
        assert added == 0, ctypes.get_errno()

    def close(self) -> None:
        for fd in self.pipe:
            os.close(fd)
        for each in (self.epoll, self.listener, self.connection, self.other_side):
            each.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def test_a_connection_is_found_and_its_duplicate_is_the_same_socket(loop):
    assert loop.connections() == [loop.connection.fileno()]
    copy = duplicate(loop.connection.fileno(), os.fstat(loop.connection.fileno()).st_ino)
    assert copy is not None
    end_reading(copy)
    os.close(copy)
    assert loop.connection.recv(1) == b""
    assert loop.connection.send(b"x") == 1, "only reading has ended"


def test_a_socket_that_took_the_number_of_one_that_lives_on_elsewhere_is_left_alone(loop):
    number = loop.connection.fileno()
    elsewhere = loop.connection.dup()  # or in a process that was forked: the epoll set keeps its entry
    ours, theirs = socket.socketpair()
    os.dup2(ours.fileno(), number)
    try:
        assert loop.connections() == []
    finally:
        for each in (elsewhere, ours, theirs):
            each.close()


def test_only_what_is_asked_for_is_looked_at(loop):
    number = loop.epoll.fileno()
    assert [found.epoll for found in event_loops_among(range(number, number + 8))] == [number]
    assert list(event_loops_among(range(number + 1, number + 8))) == []


OPENS = """
import socket
from hyperpod_ext.runtime.process_group.gloo.sockets import next_descriptor

expected = next_descriptor()
assert socket.socket().fileno() == expected
"""


def test_the_kernel_gives_the_next_descriptor_to_what_is_opened_next():
    done = warm_code.run(OPENS)  # alone: what other tests have left running opens files, too
    assert done.returncode == 0, done.stderr


def test_what_waits_for_one_event_only_is_not_touched_when_a_thread_is_quietened(loop):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop.add(ours.fileno(), select.EPOLLIN | select.EPOLLONESHOT)
        quieten(loop.look())
        armed = {connection.fd: connection.armed for connection in loop.look().connections.values()}
        assert armed == {loop.connection.fileno(): False, ours.fileno(): True}
