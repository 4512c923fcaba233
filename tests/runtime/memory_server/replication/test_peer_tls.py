"""Snapshots go from node to node with TLS as they do without."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator

import pytest
from peer_node import MIB, SECRET, Node, content, steps
from waiting import until

from hyperpod_ext.errors import NotFoundError
from hyperpod_ext.runtime.memory_server.client import peer_socket as ps


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    with contextlib.ExitStack() as stack:
        made = [Node(number, encrypted=True) for number in range(2)]
        for node in made:
            stack.callback(node.close)
        made[0].replicator.set_peers({1: made[1].address})
        yield made[0], made[1]


def test_copies_arrive_and_are_read_back(nodes: tuple[Node, Node]) -> None:
    first, second = nodes
    data = content(9 * MIB + 5, seed=3)
    for step in (1, 2):
        first.save(0, step, data[step:])
        assert first.replicator.wait_idle(60)
    until(lambda: 2 in steps(second.replicas), "the copy has not come")
    peer = second.client()
    with pytest.raises(NotFoundError):
        peer.open(0, "g9-s9", job="j")
    image = bytearray(len(data) - 2)
    checksum = peer.read_into(0, "g1-s2", 0, memoryview(image))
    assert bytes(image) == data[2:]
    parts = [(0, memoryview(bytearray(3))), (3, memoryview(bytearray(2 * MIB))), (5 * MIB, memoryview(bytearray(7)))]
    assert peer.read_scattered(0, "g1-s2", parts, len(image)) == checksum
    assert all(bytes(part) == image[start : start + len(part)] for start, part in parts)
    peer.close()


def test_a_copy_that_is_not_wanted_any_more_makes_place(nodes: tuple[Node, Node]) -> None:
    first, second = nodes
    first.replicator.rate_limit.rate = 4 * MIB
    first.save(0, 1, content(64 * MIB, 1))
    until(lambda: first.replicator.rate_limit.rate > 0, "")
    first.replicator.rate_limit.rate = 1 << 40
    first.save(0, 2, content(1 * MIB, 2))
    assert first.replicator.wait_idle(60)
    assert max(steps(second.replicas)) == 2


def test_a_connection_that_is_idle_has_nothing_to_be_read(nodes: tuple[Node, Node]) -> None:
    """It is taken again only then. TLS 1.3 may send tickets at any time; ours does not."""
    with ps.connect(*nodes[1].address, SECRET, encrypted=True) as line:
        assert isinstance(line, ssl.SSLSocket)
        assert not ps.wait_readable(line, 0.2)
        ps.disconnect(line)
        assert line.version() is not None, "a shut connection must not go on in the open"


def test_who_waits_for_a_frame_sees_what_has_been_decrypted_already() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not ps.wait_readable(ours, 0)
        theirs.sendall(b"x")
        assert ps.wait_readable(ours, 10)
